"""What an evaluation suite is: settings that identify its numbers, and a run over one checkpoint.

A suite scores one checkpoint into a folder of its own and may be killed at any point: run again with the same
folder, it goes on. eval/runner.py decides what is still to be scored and records what came out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Key:
    """One key of a command: its default as text (None: it must be given), and what it is for."""

    default: str | None
    help: str


@dataclass(frozen=True)
class Job:
    """One checkpoint to score, and where its parts go."""

    checkpoint: Path
    """A checkpoint directory of a run, or a Hugging Face folder."""
    step: int
    folder: Path
    """The suite's own folder for this checkpoint and these settings; holds what a killed attempt left."""
    device: str = "cpu"
    dtype: str = "float32"
    processes: int = 1


@dataclass
class SuiteResult:
    """What a suite found. With `not_run` set, nothing was scored and nothing is recorded as done."""

    scores: dict[str, float] = field(default_factory=dict)
    """Headline numbers; logged as eval/<key> beside the training curves."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each task: n, correct, accuracy, seconds, and what it was run with."""
    not_run: str | None = None
    """Why nothing could be scored, and the command that helps."""
    notes: list[str] = field(default_factory=list)


class Suite(Protocol):
    @property
    def name(self) -> str: ...

    def settings(self) -> dict[str, Any]:
        """JSON values of everything that can change the numbers: data checksums, caps, rules, versions."""
        ...

    def run(self, job: Job) -> SuiteResult: ...
