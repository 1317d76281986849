"""The verbs inside a job, with a stand-in for its environment."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.alerts import wandb_alert
from launch.cli import main
from launch.submit import ROOT
from tests.unit.launch_fixtures import write_run
from train.run_dir import RunDir, read_lines


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of one node in the middle of job 7's first attempt."""
    for name, value in {
        "JOB_ID": "7",
        "JOB_NUM_NODES": "1",
        "JOB_NODELIST": "n1",
        "RESTART_COUNT": "1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("ALERT_COMMAND", raising=False)
    run = write_run(tmp_path)
    run.code.mkdir()
    (run.code / "tree.sha256").write_text("abc\n")
    return run


def end(run: RunDir, status: int, signal: str = "", problem: str = "") -> int:
    words = ["attempt=1", f"status={status}", f"signal={signal}", f"problem={problem}"]
    return main(["end", f"run={run.path}", *words])


def test_begin_records_where_it_starts_and_forgets_old_requests(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.stop_file.parent.mkdir()
    run.stop_file.touch()
    assert main(["begin", f"run={run.path}"]) == 0
    assert capsys.readouterr().out == "2 1 2\n"  # attempt, nodes, ranks a node
    assert not run.stop_file.exists()
    line = list(read_lines(run.attempts))[-1]
    assert (line["checkpoint"], line["restart"], line["nodes"], line["code"]) == (30, 1, "n1", "abc")


def test_end_says_what_to_do_and_why(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(run, 137) == 0
    assert capsys.readouterr().out == "again 0\n"
    ended, decided = list(read_lines(run.attempts))[-2:]
    assert (ended["outcome"], ended["reason"]) == ("failed", "srun exited with status 137")
    assert (decided["event"], decided["action"]) == ("decision", "again")


def test_an_attempt_that_the_scheduler_ended_is_no_crash(run: RunDir) -> None:
    end(run, 143, "TERM")
    assert [line["outcome"] for line in read_lines(run.attempts) if line["event"] == "end"] == ["ended"]


def test_what_the_rank_recorded_is_kept(run: RunDir) -> None:
    run.end_attempt(1, "failed", 5, reason="step 6: loss is nan")
    end(run, 1)
    assert [line["reason"] for line in read_lines(run.attempts) if line["event"] == "end"] == [
        "step 6: loss is nan"
    ]


def test_a_problem_found_before_the_ranks_started_is_the_reason(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    end(run, 2, problem="error: train.init_from=x does not exist")
    assert capsys.readouterr().out == "give-up 2\n"
    assert "train.init_from=x does not exist" in list(read_lines(run.attempts))[-1]["reason"]


def test_alerts(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALERT_COMMAND", f'echo "$1" >> {tmp_path}/alerts')
    end(run, 1)
    end(run, 0, "USR1")  # the scheduler's stop is no news
    end(run, 0)  # a person's is: the job is held
    end(run, 143, "TERM")  # nor is scancel
    end(run, 2, problem="unknown key")
    run.mark_done(100)
    end(run, 0)
    told = (tmp_path / "alerts").read_text().splitlines()
    assert [line.split(": ")[1] for line in told] == ["again", "hold", "given up", "finish"]
    assert all(line.startswith("a: ") for line in told)


def test_alerts_in_wandb(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of its own, which joins the run and neither names it nor ends it."""
    commands: list[list[str]] = []
    monkeypatch.setattr("launch.alerts.attempt", lambda command, what, say: commands.append(command))
    monkeypatch.setenv("WANDB_API_KEY", "x")
    end(run, 1)  # WANDB_MODE=offline: no alert
    monkeypatch.delenv("WANDB_MODE")
    end(run, 2, problem="unknown key")
    (command,) = commands
    assert command[1:4] == ["-m", "launch.alerts", str(run.path)]
    assert command[4].startswith("a: given up: ")

    import wandb

    calls: list[dict[str, Any]] = []

    class Session:
        def alert(self, **words: Any) -> None:
            calls.append(words)

        def finish(self) -> None:
            calls.append({})

    def init(**words: Any) -> Session:
        calls.append(words)
        return Session()

    monkeypatch.setattr(wandb, "init", init)
    wandb_alert(run, command[4])
    begun, told, _ = calls
    assert (begun["id"], begun["mode"]) == (run.wandb_id(), "shared")
    assert not begun["settings"].x_primary
    assert not begun["settings"].x_update_finish_state
    assert told == {"title": "a: given up", "text": command[4]}


def test_an_alert_that_fails_is_told_and_changes_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALERT_COMMAND", "exit 9")
    assert end(run, 1) == 0
    captured = capsys.readouterr()
    assert captured.out == "again 0\n"
    assert "ALERT_COMMAND failed" in captured.err


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (2, 0), (3, 7)])
def test_a_controller_that_is_away_is_asked_again(failures: int, status: int, tmp_path: Path) -> None:
    """PATIENCE of two delays makes three calls."""
    script = f"""
        source launch/lib.sh
        scontrol() {{ echo "$@" >> {tmp_path}/calls; [ $(wc -l < {tmp_path}/calls) -gt {failures} ] || return 7; }}
        PATIENCE="0 0" patiently scontrol requeue 12
    """
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ["requeue 12"] * min(failures + 1, 3)
    assert result.stderr.count("again in 0 s") == min(failures, 2)
