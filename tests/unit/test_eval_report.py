"""The report: what it shows, where phases end, and that it never compares what isn't comparable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eval.cli import main
from eval.core_tasks import CORE
from eval.report import load_chain, write_report
from eval.results import RunFiles


def entry(label: str, value: float, suite: str = "core", count: int = 2) -> dict[str, object]:
    names = list(CORE)[:count]
    tasks = {
        name: {
            "n": task.items,
            "accuracy": value,
            "shots": task.shots,
            "centred_v1": value,
            "centred_v2": value,
            "baseline_v1": 0.0,
            "baseline_v2": 0.0,
        }
        for name, task in CORE.items()
        if name in names
    }
    scores = {f"{label}/v1": value, f"{label}/v2": value - 0.01, **{f"core_task/{n}": value for n in names}}
    return {
        "suite": suite,
        "settings_hash": "0a1b2c3d",
        "scores": scores,
        "tasks": tasks,
        "notes": [],
        "seconds": 61.0,
        "device": "cpu",
        "processes": 1,
    }


def code_entry(value: float) -> dict[str, object]:
    scores = {
        f"{name}/pass@{k}": value * k**0.2 for name in ("humaneval_plus", "mbpp_plus") for k in (1, 2, 4)
    }
    scores["humaneval_plus/sampled_pass@1"] = 0.11
    scores["builtin_code/pass@1"] = 0.5
    return entry("", 0.0, "code") | {"scores": scores, "tasks": {}, "notes": ["pass@1 has an interval"]}


def run_of(folder: Path, label: str, values: dict[int, float], count: int = 2) -> Path:
    """A run of two million tokens a step."""
    run = RunFiles(folder)
    for step, value in values.items():
        run.record(step, {}, entry(label, value, count=count))
        run.record(step, {}, code_entry(value / 2))
    (folder / "resolved.yaml").write_text("train: {global_batch_size: 20000, seq_len: 100}\n")
    return folder


def test_report_of_two_phases(tmp_path: Path) -> None:
    first = run_of(tmp_path / "phase1", "core", {500: 0.1, 1000: 0.21})
    second = run_of(tmp_path / "phase2", "core", {250: 0.3456}, count=22)
    chain = load_chain([first, second])
    assert chain.series("core/v1") == [(1.0, 0.1), (2.0, 0.21), (2.5, 0.3456)]  # billions of tokens
    assert chain.boundaries == [(0.0, "phase1"), (2.0, "phase2")]
    page = write_report([first, second]).read_text()
    assert (second / "evals" / "report.html").exists()
    assert "core v1 0.3456" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page), "the page must hold everything itself"
    text = (second / "evals" / "report.md").read_text()
    assert "| phase2, step 250 | 0.346 | 0.336 |" in text
    models = [line.split(" | ")[0] for line in text.splitlines() if re.match(r"\| .* \| 0\.\d{3} \|", line)]
    ours = models.index("| phase2, step 250")
    assert (models[ours - 1], models[ours + 1]) == ("| Gemma-2B", "| OLMo-1B")
    assert (
        "| last checkpoint | pass@1 | sampled pass@1 | pass@2 | pass@4 | reference recipe, pass@1 |" in text
    )
    assert "| HumanEval+ | 17.3 % | 11.0 % | 19.8 % | 22.8 % | 45.1 % |" in text
    assert "| built-in problems | 50.0 % | – | – | – | – |" in text
    assert "- pass@1 has an interval" in text
    assert f"| phase2 | 250 | core | {sum(t.items for t in CORE.values()):,} | 61.0 |" in text
    for name in CORE:
        assert f"| {name} |" in text


@pytest.mark.parametrize("label", ["core_21", "core_max500", "core_part"])
def test_other_means_are_not_set_beside_core(tmp_path: Path, label: str) -> None:
    write_report([run_of(tmp_path / "run", label, {10: 0.3})])
    text = (tmp_path / "run" / "evals" / "report.md").read_text()
    assert f"{label} is not CORE and not comparable with it" in text
    assert "Llama3-8B" not in text


def test_without_known_tokens_the_axis_is_the_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "core", {10: 0.3})
    (run / "resolved.yaml").unlink()
    chain = load_chain([run])
    assert (chain.unit, chain.points[0].x) == ("step", 10)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_of(tmp_path / "a", "core", {10: 0.3})
    second = run_of(tmp_path / "b", "core", {10: 0.4})
    assert main(["report", str(first), str(second), f"out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "report.html").exists()
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "nothing has been scored" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "is not a run directory" in capsys.readouterr().err
