"""The table of views, and what W&B and TensorBoard make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from train.cli import prepare
from train.titan import chain_name
from train.views import VIEWS, Chart
from train.wandb_mode import wandb_mode


def test_a_chart_shows_its_tags_and_no_others() -> None:
    chart = Chart("", "", ("loss", "loss/*"))
    tags = ["loss/prose", "grad_norm", "loss", "loss/a/b", "xloss", "validation/prose/loss", "loss/code"]
    assert chart.of(tags) == ["loss", "loss/prose", "loss/code"]
    assert not chart.exact
    assert Chart("", "", ("eval/*/pass@*",)).of(["eval/mbpp_plus/pass@16", "eval/core/v2"]) == [
        "eval/mbpp_plus/pass@16"
    ]
    tasks = next(chart for chart in VIEWS["Evaluation"] if chart.title == "Tasks")
    assert tasks.of(["eval/core_task/copa", "eval/core_21_max500/v2"]) == ["eval/core_task/copa"]


def test_sections_are_those_people_expect() -> None:
    assert list(VIEWS) == ["Loss", "Data mixture", "System", "Stability", "Evaluation"]
    titles = [chart.title for charts in VIEWS.values() for chart in charts]
    assert len(set(titles)) == len(titles), "TensorBoard keeps one chart of a title"


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "x"}, "shared"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "disabled"),
        ({"WANDB_MODE": "online"}, "offline"),
        ({"NETRC": "netrc"}, "shared"),
        ({"NETRC": "netrc", "WANDB_BASE_URL": "https://wandb.example.org"}, "offline"),
    ],
)
def test_wandb_is_shared_where_there_is_a_key(
    environment: dict[str, str], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eval.tracking import _wandb_mode

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)
    assert (wandb_mode(), _wandb_mode()) == (mode, mode)


def test_two_processes_share_one_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online, neither numbers history lines itself, and only the trainer decides the run's name and state."""
    import wandb

    from eval.results import RunFiles
    from eval.tracking import _to_wandb
    from train.metrics import WandbRun
    from train.run_dir import RunDir

    calls: list[dict[str, Any]] = []

    class Session:
        summary: dict[str, float] = {}  # noqa: RUF012 - a stand-in

        def log(self, row: dict[str, Any]) -> None:
            calls[-1].setdefault("rows", []).append(row)

        define_metric = finish = lambda self, *args, **kwargs: None

    def init(**words: Any) -> Session:
        calls.append(words)
        return Session()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    WandbRun(RunDir(tmp_path), "project", "chain/phase1", "chain", 128, {}).log({"loss": 1.0}, 3)
    row = {"step": 2, "eval/core/v2": 0.5}
    _to_wandb(RunFiles(tmp_path), [row], {"core/v2": 0.5}, {"wandb_project": "project"})
    trainer, evaluation = calls
    assert trainer["id"] == evaluation["id"] == RunDir(tmp_path).wandb_id()
    assert [call["mode"] for call in calls] == ["shared", "shared"]
    assert [call["settings"].x_primary for call in calls] == [True, False]
    assert [call["settings"].x_update_finish_state for call in calls] == [True, False]
    assert (trainer["name"], trainer["group"]) == ("chain/phase1", "chain")
    assert not {"name", "group", "config"} & set(evaluation)
    assert trainer["rows"] == [{"train/step": 3, "train/tokens": 384, "loss": 1.0}]
    assert evaluation["rows"] == [{"eval/step": 2, "eval/core/v2": 0.5}]


def test_phases_of_a_chain_are_one_group(tiny_data: Path, tmp_path: Path) -> None:
    first = tiny_config(tiny_data, tmp_path, "name=one")
    prepare(first)
    prepare(second := tiny_config(tiny_data, tmp_path, "name=two", "train.init_from=one"), later=True)
    third = tiny_config(tiny_data, tmp_path, "name=three", "train.init_from=two")
    assert [chain_name(config) for config in (first, second, third)] == ["one"] * 3
    assert chain_name(tiny_config(tiny_data, tmp_path, "name=smoke/sft", "train.init_from=two")) == "smoke"
    assert chain_name(tiny_config(tiny_data, tmp_path, "train.init_from=gone")) == "tiny"
