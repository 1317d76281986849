"""What happens after an attempt: the decision table of a run under a scheduler, as a pure function.

| event | action |
|---|---|
| the run is done | finish: exit 0, no requeue |
| stopped at the scheduler's signal (time limit, preemption), state saved | requeue, not counted |
| stopped by a person (control/stop), state saved | requeue, held until released, not counted |
| the scheduler ends the job (SIGTERM: scancel, preemption by requeue) | leave it: the scheduler has decided |
| crash | again, once in the same allocation; then requeue |
| the third crash in a row without a new checkpoint | give up, exit 3 |
| a configuration that cannot run (exit 2) | give up, exit 2 |
| bad node, before an attempt | a successor without it (launch/job.py) |
| node failure | the scheduler requeues by itself; the attempt counts as a crash |

An *attempt* is one process group, an *allocation* is one start of a job: the same job has a new one after each
requeue. Attempts are counted from the last time the run was given up, since a person has looked at it then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["finish", "again", "requeue", "hold", "leave", "give-up"]
Signal = Literal["USR1", "TERM"]

EXIT_CONFIGURATION = 2  # also what `python -m train` exits with
EXIT_NO_PROGRESS = 3
BARREN_LIMIT = 3  # attempts in a row without a new checkpoint
CRASHES_PER_ALLOCATION = 2  # the first and one restart


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    exit_code: int = 0


@dataclass
class Attempt:
    """One process group, read from the lines of attempts.jsonl."""

    number: int
    begun: float  # Unix time
    facts: Mapping[str, Any]
    ended: float | None = None
    outcome: str | None = (
        None  # done, stopped, ended by the scheduler, failed; None: killed before it could say
    )
    step: int | None = None  # where it ended
    reason: str | None = None

    @property
    def crashed(self) -> bool:
        """Also one that is still running: ask about attempts that are over."""
        return self.outcome not in ("done", "stopped", "ended")

    @property
    def allocation(self) -> tuple[Any, Any]:
        return self.facts.get("job"), self.facts.get("restart")

    @property
    def checkpoint(self) -> int | None:
        """The newest complete checkpoint's step when it began; None where that was not recorded."""
        return self.facts.get("checkpoint")


def read_attempts(lines: Iterable[Mapping[str, Any]]) -> list[Attempt]:
    """Attempts in order; several ends of one attempt (a rank's and the launcher's) count as the first."""
    attempts: dict[int, Attempt] = {}
    for line in lines:
        if line["event"] == "start":
            number = line["attempt"]
            attempts[number] = Attempt(number, line["time"], facts=line)
        elif line["event"] == "end" and line["attempt"] in attempts:
            attempt = attempts[line["attempt"]]
            if attempt.outcome is None:
                attempt.ended, attempt.outcome = line["time"], line["outcome"]
                attempt.step, attempt.reason = line["step"], line.get("reason")
    return list(attempts.values())


def gave_up(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The line that says why the run was given up, unless an attempt has begun since."""
    last = None
    for line in lines:
        if line["event"] == "gave_up":
            last = line
        elif line["event"] == "start":
            last = None
    return last


def barren_attempts(lines: Iterable[Mapping[str, Any]], newest: int) -> int:
    """How many attempts in a row, up to the last, ended in a crash without a new checkpoint.

    `newest` is the step of the newest complete checkpoint now, 0 for none. Attempts that were stopped or ended by
    a person or the scheduler are passed over.
    """
    recent: list[Mapping[str, Any]] = []
    for line in lines:
        recent = [] if line["event"] == "gave_up" else [*recent, line]
    count, after = 0, newest
    for attempt in reversed(read_attempts(recent)):
        before = attempt.checkpoint
        if before is None or after > before:
            break
        count += attempt.crashed
        after = before
    return count


def no_progress(lines: Iterable[Mapping[str, Any]], barren: int, newest: int) -> str:
    """Why a run without progress is given up, with what its last attempt said."""
    told = [a.reason for a in read_attempts(lines) if a.reason]
    last = f"; the last: {told[-1]}" if told else ""
    return f"{barren} attempts in a row without a checkpoint after step {newest}{last}"


def decide(
    lines: Iterable[Mapping[str, Any]],
    *,
    attempt: int,
    status: int,
    signal: Signal | None,
    done: bool,
    newest: int,
) -> Decision:
    """What to do after `attempt`, whose processes exited with `status` after the batch script got `signal`.

    `lines` are those of attempts.jsonl; `newest` is the newest complete checkpoint's step, 0 for none.
    """
    lines = list(lines)
    if done:
        return Decision("finish", "the token budget has been trained on")
    if status == EXIT_CONFIGURATION:
        reason = next((a.reason for a in read_attempts(lines) if a.number == attempt and a.reason), "")
        return Decision("give-up", f"the configuration cannot run: {reason}", EXIT_CONFIGURATION)
    if signal == "TERM":
        return Decision("leave", f"the scheduler ends the job; the newest checkpoint is step {newest}")
    if status == 0 and signal == "USR1":
        return Decision("requeue", f"stopped at the scheduler's signal, saved at step {newest}")
    if status == 0:
        return Decision("hold", f"stopped on request, saved at step {newest}")
    barren = barren_attempts(lines, newest)
    if barren >= BARREN_LIMIT:
        return Decision("give-up", no_progress(lines, barren, newest), EXIT_NO_PROGRESS)
    attempts = read_attempts(lines)
    this = next(a for a in attempts if a.number == attempt)
    crashes = sum(a.allocation == this.allocation and a.crashed for a in attempts)
    told = f"exit status {status}" + (f" ({this.reason})" if this.reason else "")
    if signal is None and crashes < CRASHES_PER_ALLOCATION:
        return Decision("again", f"{told}; restarting in the same allocation")
    return Decision("requeue", f"{told}; crash {crashes} of this allocation")
