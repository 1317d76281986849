"""The decision table of launch/attempts.py, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from launch.attempts import barren_attempts, decide, gave_up, read_attempts

Line = dict[str, Any]


def start(attempt: int, checkpoint: int, job: str = "1", restart: int = 0) -> Line:
    return {
        "event": "start",
        "attempt": attempt,
        "time": 10.0 * attempt,
        "job": job,
        "restart": restart,
        "checkpoint": checkpoint,
    }


def end(attempt: int, outcome: str = "failed", reason: str | None = None) -> Line:
    return {
        "event": "end",
        "attempt": attempt,
        "time": 10.0 * attempt + 5,
        "outcome": outcome,
        "step": 7,
        "reason": reason,
    }


FIRST = [start(1, 0), end(1)]
SECOND_CRASH = [*FIRST, start(2, 0), end(2)]
THREE_BARREN = [*SECOND_CRASH, start(3, 0, restart=1), end(3)]
STOPPED = [start(1, 0), end(1, "stopped")]

# name: lines, arguments (status, signal, done, newest), expected action and exit code, words of the reason
TABLE: dict[str, tuple[list[Line], tuple[int, Any, bool, int], tuple[str, int], str]] = {
    "done": ([start(1, 0), end(1, "done")], (0, None, True, 20), ("finish", 0), "budget"),
    "done, though a rank died after it": (
        [start(1, 0), end(1, "done")],
        (137, None, True, 20),
        ("finish", 0),
        "budget",
    ),
    "done at the scheduler's signal": (
        [start(1, 0), end(1, "done")],
        (0, "USR1", True, 20),
        ("finish", 0),
        "budget",
    ),
    "time limit or preemption, saved": (STOPPED, (0, "USR1", False, 7), ("requeue", 0), "step 7"),
    "stopped by a person": (STOPPED, (0, None, False, 7), ("hold", 0), "on request"),
    "ended by the scheduler": (FIRST, (143, "TERM", False, 5), ("leave", 0), "step 5"),
    "ended by the scheduler, saved": (STOPPED, (0, "TERM", False, 7), ("leave", 0), "step 7"),
    "crash": (FIRST, (1, None, False, 0), ("again", 0), "same allocation"),
    "crash that said why": (
        [start(1, 0), end(1, reason="step 7: loss is nan")],
        (1, None, False, 0),
        ("again", 0),
        "exit status 1 (step 7: loss is nan); restarting",
    ),
    "crash with progress": (FIRST, (137, None, False, 5), ("again", 0), "status 137"),
    "crash while saving at the signal": (FIRST, (1, "USR1", False, 0), ("requeue", 0), "crash 1"),
    "second crash of the allocation": (SECOND_CRASH, (1, None, False, 0), ("requeue", 0), "crash 2"),
    "first crash of the next allocation": (
        [start(1, 0), end(1), start(2, 5, restart=1), end(2)],
        (1, None, False, 9),
        ("again", 0),
        "status 1",
    ),
    "first crash of another job": (
        [start(1, 0), end(1), start(2, 5, job="2"), end(2)],
        (1, None, False, 9),
        ("again", 0),
        "status 1",
    ),
    "third crash in a row without progress": (
        THREE_BARREN,
        (1, None, False, 0),
        ("give-up", 3),
        "3 attempts in a row",
    ),
    "third crash, but a checkpoint was written in it": (
        THREE_BARREN,
        (1, None, False, 5),
        ("again", 0),
        "status 1",
    ),
    "the reason of the last attempt is told when a run is given up": (
        [*SECOND_CRASH, start(3, 0, restart=1), end(3, reason="step 7: loss is nan")],
        (1, None, False, 0),
        ("give-up", 3),
        "the last: step 7: loss is nan",
    ),
    "killed attempts count: they have no end": (
        [start(1, 5), start(2, 5, restart=1), start(3, 5, restart=2), end(3)],
        (1, None, False, 5),
        ("give-up", 3),
        "after step 5",
    ),
    "configuration": (
        [start(1, 0), end(1, reason="data.root is missing")],
        (2, None, False, 0),
        ("give-up", 2),
        "data.root is missing",
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_decision_table(row: str) -> None:
    lines, (status, signal, done, newest), expected, words = TABLE[row]
    attempt = lines[-1]["attempt"]
    decision = decide(lines, attempt=attempt, status=status, signal=signal, done=done, newest=newest)
    assert (decision.action, decision.exit_code) == expected
    assert words in decision.reason


def test_stops_on_request_are_not_counted_and_do_not_break_the_row() -> None:
    lines = [start(1, 0), end(1), start(2, 0), end(2, "stopped"), start(3, 0), end(3), start(4, 0), end(4)]
    assert barren_attempts(lines, newest=0) == 3
    assert barren_attempts([*lines, start(5, 0), end(5, "ended")], newest=0) == 3  # scancel
    assert barren_attempts(lines[:6], newest=0) == 2
    assert barren_attempts(lines, newest=5) == 0


def test_progress_in_the_middle_starts_the_count_anew() -> None:
    lines = [start(1, 0), end(1), start(2, 0), end(2), start(3, 5), end(3)]
    assert barren_attempts(lines, newest=5) == 1


def test_the_count_starts_anew_after_a_person_has_resubmitted() -> None:
    lines = [*THREE_BARREN, {"event": "gave_up", "time": 99.0, "reason": "three", "exit_code": 3}]
    assert barren_attempts(lines, newest=0) == 0
    assert (gave_up(lines) or {})["reason"] == "three"
    resumed = [*lines, start(4, 0, job="2"), end(4)]
    assert gave_up(resumed) is None
    assert barren_attempts(resumed, newest=0) == 1


def test_the_first_end_of_an_attempt_counts() -> None:
    """Rank 0 says why, the launcher only that srun failed."""
    attempts = read_attempts([start(1, 0), end(1, reason="loss is nan"), end(1, reason="srun exited with 1")])
    assert [a.reason for a in attempts] == ["loss is nan"]


def test_attempts_started_without_the_launcher_do_not_count() -> None:
    """`python -m train` on one machine records no checkpoint; nothing is known of its progress."""
    lines = [{"event": "start", "attempt": n, "time": 1.0 * n, "ranks": 1} for n in (1, 2, 3)]
    assert barren_attempts(lines, newest=0) == 0
