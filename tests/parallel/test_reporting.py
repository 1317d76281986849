"""What a run reports, and where: TensorBoard and W&B tags, the schedule, the report of a chain of runs."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.report import write_report
from tests.runs import train
from tests.tiny import tiny_config
from train.run_dir import RunDir, append_line
from train.views import VIEWS

WORDS = ["metrics.tensorboard=true", "metrics.wandb=true", "validation.every_steps=10"]
SECRET = "0123456789abcdef" * 2 + "01234567"  # never whole in a file, which a diff could hold


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    os.environ["WANDB_API_KEY"] = SECRET
    try:
        return train(tiny_config(tiny_data, tmp_path_factory.mktemp("reporting"), *WORDS))
    finally:
        del os.environ["WANDB_API_KEY"]


def test_tensorboard_has_the_numbers_of_the_jsonl(run: RunDir) -> None:
    events = EventAccumulator(str(run.tensorboard)).Reload()
    for kind, tags in (
        (
            "train",
            ["loss", "loss/code", "grad_norm", "lr", "tokens", "tokens_per_second", "data/prose/tokens"],
        ),
        ("validation", ["validation/prose/loss", "validation/code/bits_per_byte"]),
    ):
        rows = run.metric_rows(kind)
        for tag in tags:
            told = {event.step: event.value for event in events.Scalars(tag)}
            assert told == pytest.approx({row["step"]: row[tag] for row in rows if tag in row}, rel=1e-6)


def test_every_number_is_on_a_chart(run: RunDir) -> None:
    """But for counters, which only serve others as an axis or for the audit, and the part of a shown whole."""
    unseen = {"kind", "step", "time", "tokens", "sequences", "seconds/step", "loader/wait_seconds"}
    shown = [chart for charts in VIEWS.values() for chart in charts]
    for kind in ("train", "validation"):
        tags = [tag for row in run.metric_rows(kind) for tag in row if not tag.endswith("/sequences")]
        assert {tag for tag in tags if not any(chart.of([tag]) for chart in shown)} <= unseen


def test_consumed_and_planned_shares(run: RunDir) -> None:
    for row in run.metric_rows("train"):
        for source, weight in (("prose", 0.7), ("code", 0.3)):
            assert row[f"data/{source}/share"] == row[f"data/{source}/planned"]
            assert abs(row[f"data/{source}/planned"] - weight) < 1 / row["sequences"]


def test_tensorboard_has_a_layout_of_the_same_views(run: RunDir) -> None:
    events = EventAccumulator(str(run.tensorboard)).Reload()
    layout: Any = importlib.import_module("tensorboard.plugins.custom_scalar.layout_pb2").Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(VIEWS)
    tags = events.Tags()["scalars"]
    found = {
        chart.title: [tag for tag in tags if re.match(chart.multiline.tag[0], tag)]
        for category in layout.category
        for chart in category.chart
    }
    assert found["Held-out loss"] == ["validation/prose/loss", "validation/code/loss"]
    assert found["Learning rate"] == ["lr"]
    assert found["Where a step's time goes"] != []


def test_wandb_is_written_offline_under_the_fixed_id(run: RunDir) -> None:
    assert list(run.wandb.glob(f"offline-run-*-{run.wandb_id()}"))


def test_no_secret_reaches_the_run_directory(run: RunDir) -> None:
    assert os.environ.get("WANDB_API_KEY") is None
    for file in run.path.rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file


def test_the_time_of_a_step_is_split(run: RunDir) -> None:
    for row in run.metric_rows("train"):
        parts = ["data", "forward_backward", "optimizer", "checkpoint", "validation"]
        split = [row[f"seconds/{part}"] for part in parts]
        assert min(split) >= 0
        assert sum(split) == pytest.approx(row["seconds/step"], rel=0.35, abs=0.02)


def test_the_loader_tells_how_long_it_was_waited_for(run: RunDir) -> None:
    rows = run.metric_rows("train")
    waits = [row["loader/wait_seconds"] for row in rows]
    assert waits == sorted(waits)
    assert waits[-1] <= sum(row["seconds/data"] for row in rows)
    assert all(0 <= row["loader/ready"] <= 2 for row in rows)


def test_no_mfu_on_cpu(run: RunDir) -> None:
    assert all("mfu" not in row for row in run.metric_rows("train"))


def test_warm_up_stable_decay(run: RunDir) -> None:
    """4 steps up to 3e-3, stable, and 4 steps of linear decay that would reach 0 one step after the end."""
    rates = [row["lr"] for row in run.metric_rows("train")]
    expected = [0.75e-3, 1.5e-3, 2.25e-3, *[3e-3] * 14, 2.25e-3, 1.5e-3, 0.75e-3]
    assert rates == pytest.approx(expected)


def test_losses_per_source_add_up(run: RunDir) -> None:
    before: dict[str, int] = dict.fromkeys(("prose", "code"), 0)
    for row in run.metric_rows("train"):
        now = {source: row[f"data/{source}/tokens"] for source in before}
        tokens = {source: now[source] - before[source] for source in before}
        total = sum(tokens[s] * row[f"loss/{s}"] for s in before if tokens[s])
        assert total / sum(tokens.values()) == pytest.approx(row["loss"], rel=1e-9)
        before = now


def test_report_of_two_phases(run: RunDir, tiny_data: Path, tmp_path: Path) -> None:
    weights = ["~data.weights", "+data.weights={prose:0.2,code:0.8}"]
    start = f"train.init_from={run.complete_checkpoints()[-1][1]}"
    second = train(tiny_config(tiny_data, tmp_path, *WORDS, *weights[1:], start))
    samples = [{"title": "A sample", "prompt": "x1 = ", "text": "3 + 4 <b>", "end_reason": "length"}]
    stages = [{"name": "first", "seconds": 1.25}, {"name": "second", "seconds": 2.0}]
    append_line(
        second.metrics, {"kind": "eval", "step": 20, "eval/builtin/v2": 0.125, "eval/builtin_task/x": 0.5}
    )
    runs = [("first", run.path), ("second", second.path)]
    page = write_report(tmp_path, runs, samples, stages, ["nothing else was run"])
    html, markdown = page.read_text(), (tmp_path / "report.md").read_text()
    assert html.count("data:image/png;base64,") == 4
    assert "http" not in html.replace("http-equiv", ""), "the report must not need the network"
    assert "3 + 4 &lt;b&gt;" in html
    assert "| first | 20 of 20 | 2,560 |" in markdown
    assert "| code | 30 % → 80 % |" in markdown
    assert "| second | 20 | builtin/v2 | 0.1250 |" in markdown
    assert "builtin_task" not in markdown
    assert "nothing else was run" in html
    assert "| all | 3.2 |" in markdown or "| all | 3.3 |" in markdown
