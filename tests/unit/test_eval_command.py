"""The command over real checkpoints: results, SIGKILL in the middle, several processes, mistakes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from eval.cli import main
from eval.results import RunFiles, read_lines, read_result
from tests.unit.eval_fixtures import small_tokenizer, write_checkpoint, write_core_data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tokenizer = small_tokenizer(tmp_path)
    for step in (20, 5):
        write_checkpoint(tmp_path / "run", step, tokenizer)
    (tmp_path / "run" / "checkpoints" / "step-30").mkdir()
    (tmp_path / "run" / "DONE").write_text("step 20\n")
    return tmp_path / "run"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_core_data(tmp_path / "data", copies=8)
    return tmp_path / "data"


def item_lines(run: Path, step: int) -> dict[str, list[dict[str, Any]]]:
    """Every task's lines, without the times."""
    (folder,) = (run / "evals" / f"step-{step}").iterdir()
    return {
        file.stem: [{k: v for k, v in line.items() if k != "seconds"} for line in read_lines(file)]
        for file in sorted(folder.glob("*.jsonl"))
    }


def follow(run: Path, data: Path) -> None:
    main(["--follow", f"run={run}", "suite=core", f"data={data}"])


def test_killed_anywhere_every_checkpoint_is_scored_once(run: Path, data: Path, tmp_path: Path) -> None:
    """SIGKILL a follower five times, each a little later; the results are those of one that was left alone."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoints").symlink_to(run / "checkpoints")
    (other / "DONE").touch()
    follow(other, data)
    context = multiprocessing.get_context("fork")
    written = run / "evals"

    def size() -> int:
        total = 0
        for file in written.rglob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # parts are merged and removed meanwhile
                total += file.stat().st_size
        return total

    kills = 0
    for _ in range(5):
        before = size()
        process = context.Process(target=follow, args=(run, data))
        process.start()
        deadline = time.monotonic() + 60
        while size() < before + 1500 and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
    assert kills >= 2
    follow(run, data)
    for step in (5, 20):
        ours, theirs = (
            read_result(RunFiles(run).result_file(step)),
            read_result(RunFiles(other).result_file(step)),
        )
        assert [e["scores"] for e in ours["suites"]] == [e["scores"] for e in theirs["suites"]]
        assert len(ours["suites"]) == 1
        for task, lines in item_lines(run, step).items():
            # A batch is made of other items after a kill, so scores agree to rounding only.
            for mine, plain in zip(lines, item_lines(other, step)[task], strict=True):
                assert mine.pop("scores") == pytest.approx(plain.pop("scores"), abs=1e-5)
                assert mine == plain
    assert not RunFiles(run).result_file(30).exists()
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["kind"] == "eval"]
    assert [row["step"] for row in rows] == [5, 20]


def test_one_checkpoint_then_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"checkpoint={run}/checkpoints/step-20", "suite=builtin"]
    assert main(words) == 0
    result = read_result(run / "evals" / "step-20.json")
    (entry,) = result["suites"]
    assert {name: task["n"] for name, task in entry["tasks"].items()} == {
        "builtin_choice": 24,
        "builtin_schema": 12,
        "builtin_recall": 24,
    }
    assert "step 20: builtin in" in capsys.readouterr().out
    assert main(words) == 0
    assert "step 20: builtin is done" in capsys.readouterr().out
    assert read_result(run / "evals" / "step-20.json") == result


def test_processes_give_the_same_results(run: Path) -> None:
    words = [f"checkpoint={run}/checkpoints/step-20", "suite=builtin"]
    assert main([*words, f"out={run}/one"]) == 0
    assert main([*words, f"out={run}/two", "processes=2"]) == 0
    one, two = (read_result(run / name / "evals" / "step-20.json")["suites"][0] for name in ("one", "two"))
    assert one["scores"] == two["scores"]
    assert (one["processes"], two["processes"]) == (1, 2)
    for task, lines in item_lines(run / "one", 20).items():
        assert [line["correct"] for line in lines] == [
            line["correct"] for line in item_lines(run / "two", 20)[task]
        ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["suite=builtin"], "give checkpoint=FOLDER to score one, or --follow run="),
        (["checkpoint=nowhere", "suite=builtin"], "checkpoint=nowhere is not a folder"),
        (
            ["checkpoint={run}/checkpoints/step-30", "suite=builtin"],
            "is not complete: it has no manifest.json",
        ),
        (["checkpoint={run}/checkpoints/step-20", "suite=cor"], "suite=cor must name some of core, builtin"),
        (["checkpoint={run}/checkpoints/step-20", "data={data}", "limit=10"], "take limit=11 or more"),
        (
            ["checkpoint={run}/checkpoints/step-20", "data={data}", "limit=many"],
            "limit=many is no whole number",
        ),
        (["checkpoint={run}/checkpoints/step-20", "data={data}", "rules=other"], "one of dclm, nanochat"),
        (
            ["checkpoint={run}/checkpoints/step-20", "suite=builtin", "device=tpu"],
            "device=tpu is not on this",
        ),
        (["checkpoint={run}/checkpoints/step-20", "suite=builtin", "stepp=3"], "unknown argument 'stepp=3'"),
        (["aggregate", "nowhere.json"], "nowhere.json"),
        (["aggregate"], "missing scores="),
    ],
)
def test_mistakes_end_with_code_2_and_one_message(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([word.format(run=run, data=data) for word in words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("python -m eval")
    assert not (run / "evals").exists()


def test_damaged_weights_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next((run / "checkpoints" / "step-20").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert main([f"checkpoint={run}/checkpoints/step-20", "suite=builtin"]) == 2
    assert file.name in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["score", "--help"]) == 0
    assert "limit=" in capsys.readouterr().out
