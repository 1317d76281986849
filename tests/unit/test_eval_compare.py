"""Paired bootstrap: against resampling item by item, against theory, and what may be compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval.cli import main
from eval.compare import compare
from eval.results import RunFiles, append_lines


def scored(
    folder: Path, right: dict[str, list[bool]], step: int = 1, sha256: str = "f", categories: str = ""
) -> Path:
    """A run directory whose tasks have these items right."""
    run = RunFiles(folder)
    for name, flags in right.items():
        lines = [
            {"item": i, "correct": flag, **({"category": categories[i]} if categories else {})}
            for i, flag in enumerate(flags)
        ]
        append_lines(run.suite_folder(step, "core", "h") / f"{name}.jsonl", lines)
    tasks = {name: {"file_sha256": sha256} for name in right}
    run.record(step, {}, {"suite": "core", "settings_hash": "h", "scores": {}, "tasks": tasks})
    return folder


def flags(seed: int, count: int, share: float) -> list[bool]:
    return [bool(x) for x in np.random.default_rng(seed).random(count) < share]


def test_interval_equals_resampling_item_by_item(tmp_path: Path) -> None:
    right_a, right_b = flags(1, 300, 0.3), flags(2, 300, 0.4)
    a = scored(tmp_path / "a", {"lambada_openai": right_a})
    b = scored(tmp_path / "b", {"lambada_openai": right_b})
    mean, row = compare(a, b)
    change = np.array(right_b, int) - np.array(right_a, int)
    stream = np.random.default_rng(5)
    means = [stream.choice(change, 300).mean() for _ in range(10_000)]
    assert row.difference == pytest.approx(change.mean())
    assert (row.low, row.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.004)
    assert row.better == pytest.approx(np.mean(np.array(means) > 0), abs=0.01)
    assert (mean.low, mean.high, mean.items) == (row.low, row.high, 300)


def test_pairing_counts(tmp_path: Path) -> None:
    """The same accuracies, on the same items or on others: only pairing tells them apart."""
    base = [i < 50 for i in range(100)]
    a = scored(tmp_path / "a", {"lambada_openai": base})
    near = scored(tmp_path / "near", {"lambada_openai": [i < 60 for i in range(100)]})
    far = scored(tmp_path / "far", {"lambada_openai": [i >= 40 for i in range(100)]})
    (_, close), (_, wide) = compare(a, near), compare(a, far)
    assert close.difference == wide.difference == pytest.approx(0.1)
    assert close.low > 0 > wide.low


def test_tasks_weigh_the_same_and_are_centred(tmp_path: Path) -> None:
    a = scored(tmp_path / "a", {"copa": [False] * 10, "lambada_openai": [False] * 1000})
    b = scored(tmp_path / "b", {"copa": [True] * 10, "lambada_openai": [False] * 1000})
    mean, copa, lambada = compare(a, b)
    assert (copa.a, copa.b, lambada.difference) == (-1.0, 1.0, 0.0)  # copa's baseline is one half
    assert mean.difference == pytest.approx(1.0)
    assert copa.better == 1.0
    assert lambada.better == 0.5


def test_categories_weigh_the_same(tmp_path: Path) -> None:
    labels = "x" * 90 + "y" * 10
    a = scored(tmp_path / "a", {"jeopardy": [False] * 100}, categories=labels)
    b = scored(tmp_path / "b", {"jeopardy": [label == "y" for label in labels]}, categories=labels)
    assert compare(a, b)[1].b == pytest.approx(0.5)


def test_a_run_means_its_last_step(tmp_path: Path) -> None:
    scored(tmp_path / "a", {"copa": [False] * 4}, step=9)
    a = scored(tmp_path / "a", {"copa": [True] * 4}, step=10)
    b = scored(tmp_path / "b", {"copa": [True] * 4})
    assert compare(a, b)[0].difference == 0
    assert compare(a / "evals" / "step-9.json", b)[0].difference == 2.0


def test_other_data_is_not_compared(tmp_path: Path) -> None:
    a = scored(tmp_path / "a", {"copa": [True] * 4})
    b = scored(tmp_path / "b", {"copa": [True] * 4}, sha256="other")
    with pytest.raises(ValueError, match="no task in common"):
        compare(a, b)
    with pytest.raises(ValueError, match=r"has no evals/step-N\.json"):
        compare(a, tmp_path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = scored(tmp_path / "a", {"copa": [True] * 4}), scored(tmp_path / "b", {"copa": [False] * 4})
    assert main(["compare", str(a), str(b)]) == 0
    assert "| copa | 4 | 1.0000 | -1.0000 | -2.0000 |" in capsys.readouterr().out
    assert main(["compare", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["difference"] == -2.0
