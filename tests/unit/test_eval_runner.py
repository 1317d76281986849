"""Scoring checkpoints of a run: each once, never an incomplete one, whatever was interrupted; and the log."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from eval import runner
from eval.results import RunFiles, append_line, locked, read_lines, read_result, settings_hash
from eval.runner import Machine, evaluate, follow, locate
from eval.suite import Job, SuiteResult
from eval.tracking import best, log_results
from tests.unit.eval_fixtures import fake_checkpoint
from tests.unit.wandb_file import records, values

MACHINE = Machine("cpu", "float32", 1)


class Counting:
    """A suite that remembers what it was run on."""

    def __init__(self, name: str = "counting", not_run: str | None = None, on_run: Any = None, n: int = 1):
        self.name, self.not_run, self.on_run, self.n = name, not_run, on_run, n
        self.steps: list[int] = []

    def settings(self) -> dict[str, Any]:
        return {"n": self.n}

    def run(self, job: Job) -> SuiteResult:
        assert (job.checkpoint / "manifest.json").exists()
        self.steps.append(job.step)
        if self.on_run:
            self.on_run(job)
        scores = {} if self.not_run else {f"{self.name}/score": job.step / 100}
        return SuiteResult(scores, {"task": {"n": self.n}}, self.not_run)


def run_with(folder: Path, *steps: int, done: bool = True) -> RunFiles:
    for step in steps:
        fake_checkpoint(folder, step)
    if done:
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "DONE").write_text("step\n")
    return RunFiles(folder)


def test_result_file(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 5)
    assert evaluate(run, 5, run.checkpoints / "step-5", [Counting()], MACHINE) == {"counting": "scored"}
    result = read_result(run.result_file(5))
    assert (result["format"], result["version"], result["step"]) == ("laneformer-eval", 1, 5)
    assert len(result["checkpoint"]["sha256"]) == 64
    (entry,) = result["suites"]
    assert entry["suite"] == "counting"
    assert entry["settings"] == {"n": 1, "dtype": "float32"}
    assert entry["settings_hash"] == settings_hash("counting", entry["settings"])
    assert entry["scores"] == {"counting/score": 0.05}
    assert "torch" in entry["packages"]


def test_each_suite_and_setting_once(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 5)
    suites = [Counting("a"), Counting("b")]
    for _ in range(2):
        evaluate(run, 5, run.checkpoints / "step-5", suites, MACHINE)
    assert [suite.steps for suite in suites] == [[5], [5]]
    other = Counting("a", n=2)
    evaluate(run, 5, run.checkpoints / "step-5", [other], MACHINE)
    assert other.steps == [5]
    assert [entry["suite"] for entry in read_result(run.result_file(5))["suites"]] == ["a", "b", "a"]


def test_follow_in_order_and_once(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 30, 4, 20)
    (run.checkpoints / "step-40").mkdir()  # incomplete: no manifest
    (run.checkpoints / ".step-50.tmp").mkdir()
    suite = Counting()
    assert follow(run, [suite], MACHINE, poll=0) == 3
    assert suite.steps == [4, 20, 30]
    assert follow(run, [suite], MACHINE, poll=0) == 0
    assert suite.steps == [4, 20, 30]


def test_follow_sees_what_appears_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path / "run", 10, done=False)
    waits = []

    def sleep(seconds: float) -> None:
        """What training does while the follower waits: one more checkpoint, then the end."""
        waits.append(seconds)
        if len(waits) == 2:
            fake_checkpoint(run.path, 20)
        if len(waits) == 4:
            fake_checkpoint(run.path, 30)
            run.done_file.write_text("step 30\n")
        assert len(waits) < 20

    monkeypatch.setattr(runner.time, "sleep", sleep)
    suite = Counting()
    assert follow(run, [suite], MACHINE, poll=7) == 3
    assert suite.steps == [10, 20, 30]


def test_killed_between_steps_and_started_again(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 1, 2, 3)

    def die(job: Job) -> None:
        if job.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(run, [Counting(on_run=die)], MACHINE, poll=0)
    again = Counting()
    assert follow(run, [again], MACHINE, poll=0) == 2
    assert again.steps == [2, 3]
    rows = [row for row in read_lines(run.metrics) if row["kind"] == "eval"]
    assert sorted(row["step"] for row in rows) == [1, 2, 3]


def test_a_suite_that_cannot_run_is_not_recorded(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 1, 2)
    absent, said = Counting("absent", not_run="no sandbox: apt-get install bubblewrap"), []
    present = Counting("present")
    assert follow(run, [absent, present], MACHINE, poll=0, say=said.append) == 2
    assert absent.steps == [1], "it must not be tried for each checkpoint"
    assert present.steps == [1, 2]
    assert not run.is_done(1, "absent", settings_hash("absent", {"n": 1, "dtype": "float32"}))
    assert any("apt-get install bubblewrap" in line for line in said)


def test_a_checkpoint_that_the_run_removes_is_passed_over(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 1, 2)

    def vanish(job: Job) -> None:
        if job.step == 1:
            (job.checkpoint / "manifest.json").unlink()
            raise FileNotFoundError("weights")

    suite = Counting(on_run=vanish)
    assert follow(run, [suite], MACHINE, poll=0) == 1
    assert suite.steps == [1, 2]


def test_damaged_weights_are_not_scored(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 1)
    ((_, checkpoint),) = run.complete_checkpoints()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "0.distcp").write_bytes(b"changed")
    manifest["files"]["0.distcp"] = {"bytes": 7, "sha256": hashlib.sha256(b"as once").hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    suite = Counting()
    with pytest.raises(ValueError, match=r"0\.distcp is damaged"):
        follow(run, [suite], MACHINE, poll=0)
    assert suite.steps == []


def test_a_failure_is_not_taken_for_a_removal(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 1)

    def fail(job: Job) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        follow(run, [Counting(on_run=fail)], MACHINE, poll=0)


def hold(path: Path, held: Any, release: Any) -> None:
    with locked(path):
        held.set()
        release.wait(30)


def test_two_evaluators_share_the_work(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 1)
    suite = Counting()
    folder = run.suite_folder(1, "counting", settings_hash("counting", {"n": 1, "dtype": "float32"}))
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(folder / ".lock", held, release))
    other.start()
    assert held.wait(30)
    outcome = evaluate(run, 1, run.checkpoints / "step-1", [suite], MACHINE)
    assert (outcome, suite.steps) == ({"counting": "busy"}, [])
    other.kill()  # the lock goes with the process
    other.join()
    assert evaluate(run, 1, run.checkpoints / "step-1", [suite], MACHINE) == {"counting": "scored"}


def test_where_results_go(tmp_path: Path) -> None:
    checkpoint = fake_checkpoint(tmp_path / "run", 7)
    run, step = locate(checkpoint, None)
    assert (run.path, step) == ((tmp_path / "run").resolve(), 7)
    foreign = tmp_path / "gpt2"
    foreign.mkdir()
    with pytest.raises(ValueError, match=r"is not complete: it has no manifest\.json"):
        locate(foreign, None)
    (foreign / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="say where results go: out="):
        locate(foreign, None)
    run, step = locate(foreign, tmp_path / "out")
    assert (run.path, step) == ((tmp_path / "out").resolve(), 0)


def test_results_of_other_weights_are_not_taken_for_these(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", 5)
    checkpoint = run.checkpoints / "step-5"
    evaluate(run, 5, checkpoint, [Counting()], MACHINE)
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step-5\.json holds results of other weights"):
        evaluate(run, 5, checkpoint, [Counting()], MACHINE)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "step-1.json"
    for text in ("[]", "{}", '{"format": "laneformer-eval", "version": 2}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"step-1\.json"):
            read_result(file)


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    append_line(file, {"a": 1})
    with file.open("a") as stream:
        stream.write('{"a": 2')
    append_line(file, {"a": 3})
    assert [line["a"] for line in read_lines(file)] == [1, 3]
    file.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        list(read_lines(file))


# --- the log


def recorded(folder: Path, *steps: int) -> RunFiles:
    run = run_with(folder, *steps)
    (folder / "resolved.yaml").write_text(
        "name: group/a\nmetrics: {tensorboard: true, wandb: true, wandb_project: laneformer}\n"
    )
    (folder / "wandb_id").write_text("abcdef0123456789")
    for step in steps:
        run.record(
            step,
            {},
            {
                "suite": "core",
                "settings_hash": "h",
                "scores": {"core_21/v2": step / 100, "core_task/copa": 0.5},
            },
        )
    return run


def test_log_holds_each_result_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eval import tracking

    monkeypatch.setattr(tracking, "_to_wandb", lambda *args: None)
    run = recorded(tmp_path / "run", 20)
    append_line(run.metrics, {"kind": "train", "step": 20, "loss": 1.0})
    assert log_results(run) == 1
    fake_checkpoint(run.path, 10)
    run.record(10, {}, {"suite": "core", "settings_hash": "h", "scores": {"core_21/v2": 0.3}})
    assert log_results(run) == 1
    assert log_results(run) == 0
    rows = [row for row in read_lines(run.metrics) if row["kind"] == "eval"]
    assert [(row["step"], row["eval/core_21/v2"]) for row in rows] == [(20, 0.2), (10, 0.3)]
    assert best(run.results())["core_21/v2"] == 0.3

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard / "eval")).Reload()
    points = {(event.step, round(event.value, 6)) for event in events.Scalars("eval/core_21/v2")}
    assert points == {(10, 0.3), (20, 0.2)}


def test_wandb_gets_the_runs_id_and_steps_out_of_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = recorded(tmp_path / "run", 30)
    log_results(run)
    fake_checkpoint(run.path, 10)
    run.record(10, {}, {"suite": "core", "settings_hash": "h", "scores": {"core_21/v2": 0.1}})
    log_results(run)
    history, summary, ids = [], {}, set()
    files = sorted(run.path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    for file in files:
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
            if kind == "history":
                history.append(values(record.history.item))
            if kind == "summary":
                summary |= values(record.summary.update)
    assert ids == {"abcdef0123456789"}
    assert [(row["eval/step"], row["eval/core_21/v2"]) for row in history] == [(30, 0.3), (10, 0.1)]
    assert summary["best/core_21/v2"] == 0.3
