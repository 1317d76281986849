"""How far a run is, from its directory alone: what status, watch and the dashboard show.

*Goodput* is the part of the time since the first attempt began that went into steps the run kept:
steps x the median time of a step, over that time. Saves, validation, restarts, repeated steps and waiting in
the queue are what is missing to 100 %.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.attempts import Attempt, gave_up, read_attempts
from train.config import RunConfig, load_resolved
from train.run_dir import RunDir, read_lines

RECENT = 50  # logged steps that speed and time left are taken from
SLOW = 1.25  # a rank is slow whose own time in a step is so many times the median rank's


@dataclass(frozen=True)
class RankTime:
    """What train/stragglers.py measured of one rank: seconds of its own in a step, not waiting for others."""

    rank: int
    node: str
    p50: float
    p95: float
    p99: float
    factor: float  # p50 over the median rank's


@dataclass
class Progress:
    """One run at one moment. Rates are None until a step has been logged."""

    run: RunDir
    config: RunConfig
    state: str  # new, queued, running, stopped, failed, given up, done, lost
    note: str  # the reason or the job, where there is one
    attempts: list[Attempt]
    rows: list[dict[str, Any]]  # training rows by step
    now: float  # Unix time
    checkpoint: tuple[int, float] | None  # step and Unix time of the newest complete one
    evals: dict[str, tuple[int, float]] = field(default_factory=dict)  # score: newest step and value
    failed_saves: int = 0  # since the newest checkpoint
    ranks: list[RankTime] = field(default_factory=list)  # slowest first, as of the last logged step

    @property
    def slow_ranks(self) -> list[RankTime]:
        return [rank for rank in self.ranks if rank.factor > SLOW]

    @property
    def step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def tokens(self) -> int:
        return self.step * self.config.tokens_per_step

    @property
    def seconds_per_step(self) -> float | None:
        recent = [row["seconds/step"] for row in self.rows[-RECENT:]]
        return statistics.median(recent) if recent else None

    @property
    def tokens_per_second_per_rank(self) -> float | None:
        seconds = self.seconds_per_step
        if not seconds or not self.attempts:
            return None
        return self.config.tokens_per_step / seconds / self.attempts[-1].facts.get("ranks", 1)

    @property
    def seconds_left(self) -> float | None:
        """Without interruptions."""
        seconds = self.seconds_per_step
        return None if seconds is None else seconds * (self.config.steps - self.step)

    @property
    def goodput(self) -> float | None:
        if not self.rows or not self.attempts:
            return None
        typical = statistics.median(row["seconds/step"] for row in self.rows)
        ended = self.attempts[-1].ended
        until = (
            self.now if ended is None and self.state == "running" else max(ended or 0, self.rows[-1]["time"])
        )
        elapsed = until - self.attempts[0].begun
        return min(1.0, typical * self.step / elapsed) if elapsed > 0 else None


def read_progress(run: RunDir, jobs: Mapping[str, tuple[str, str, str]] | None = None) -> Progress:
    """Read a run's directory; `jobs` (see `queue`) tell a running attempt from one that was killed."""
    lines = list(read_lines(run.attempts))
    attempts, complete = read_attempts(lines), run.complete_checkpoints()
    state, note = state_of(run, attempts, gave_up(lines), (jobs or {}).get(str(run.path)))
    checkpoint = None
    if complete:
        step, directory = complete[-1]
        checkpoint = step, (directory / "manifest.json").stat().st_mtime
    metrics = list(read_lines(run.metrics))
    return Progress(
        run=run,
        config=load_resolved(run.resolved),
        state=state,
        note=note,
        attempts=attempts,
        rows=run.metric_rows("train"),
        now=time.time(),
        checkpoint=checkpoint,
        evals=eval_scores(metrics),
        failed_saves=failed_saves(metrics, checkpoint[1] if checkpoint else 0.0),
        ranks=rank_times(run),
    )


def state_of(
    run: RunDir,
    attempts: list[Attempt],
    given_up: Mapping[str, Any] | None,
    job: tuple[str, str, str] | None,
) -> tuple[str, str]:
    """The state and a note. `job` is the run's job as `queue` lists it: id, state, reason."""
    if run.done:
        return "done", ""
    if job and job[1] == "RUNNING":
        return "running", f"job {job[0]}"
    if job:
        return "queued", f"job {job[0]} {job[1].lower()}, {job[2]}"
    if given_up:
        return "given up", f"exit {given_up['exit_code']}: {given_up['reason']}"
    if not attempts:
        return "new", ""
    last = attempts[-1]
    if last.outcome is not None:
        return last.outcome, last.reason or ""
    if "job" in last.facts:
        return "lost", f"attempt {last.number} of job {last.facts['job']} has no end and no job"
    # Started without a scheduler: nobody can be asked whether it runs; its last sign of life can.
    return "running", f"on {last.facts.get('node', 'this machine')}"


def eval_scores(metrics: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """The newest value of each score, with its step."""
    scores: dict[str, tuple[int, float]] = {}
    for row in metrics:
        for key, value in row.items():
            name = key.removeprefix("eval/")
            if row["kind"] == "eval" and name != key and row["step"] >= scores.get(name, (0, 0.0))[0]:
                scores[name] = (row["step"], value)
    return scores


def failed_saves(metrics: list[dict[str, Any]], since: float) -> int:
    return sum(row["kind"] == "failed_save" and row["time"] > since for row in metrics)


def rank_times(run: RunDir) -> list[RankTime]:
    """The ranks' own times, slowest first; [] where there is one rank, or none has been logged."""
    if not run.stragglers.exists():
        return []
    report = json.loads(run.stragglers.read_text(encoding="utf-8"))
    if len(report["ranks"]) < 2 or not report["median"]:
        return []
    return [RankTime(**rank, factor=rank["p50"] / report["median"]) for rank in report["ranks"]]


def slow_words(ranks: Sequence[RankTime], most: int = 4) -> str:
    """`rank 5 on n3 (1.8 times the median rank's own time)`, of the slowest; empty for none."""
    told = [
        f"rank {r.rank} on {r.node} ({r.factor:.1f} times the median rank's own time)" for r in ranks[:most]
    ]
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(told) + more


def find_runs(folder: Path) -> list[RunDir]:
    """Every run directory below `folder`, by name; names may hold slashes. What runs hold is not searched."""
    found = []
    for path, folders, files in os.walk(folder):
        if "resolved.yaml" in files:
            found.append(RunDir(path))
            folders.clear()
    return sorted(found, key=lambda run: run.path)
