"""Names and rules of a run directory: the one place where training, evaluation and launching meet.

    runs/<name>/
        resolved.yaml     the configuration, composed and validated once
        plan.json         what the data plan is made of, for the audit and for naming what changed
        code/             commit.txt and diff.patch: the code that runs
        attempts.jsonl    one line for each start and end of a process group
        metrics.jsonl     one line for each logged step and each validation
        checkpoints/      step-N, each complete or absent
        evals/            step-N.json
        failures/         what is needed to reproduce a step that went wrong
        bad_steps.jsonl   steps whose loss was not finite or spiked, with the attempt that met them
        stragglers.json   each rank's own time in a step, slowest first, as of the last logged step
        logs/<attempt>/   output of each rank
        profile/step-N/   what steps N, N + 1, … spent time and memory on (profile=on)
        tensorboard/ wandb/ wandb_id
        control/          `stop` and `save`: touch one and the run obeys at its next step
        DONE              written when the budget has been trained on

Imports no torch. Every file is written under a temporary name, synced and renamed, except the *.jsonl
files, which grow by whole lines.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that lines of several writers do not mix.

    Where a killed writer left a line without its end, the new one begins on a line of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record) + "\n"
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, (TORN + line if torn else line).encode())
    finally:
        os.close(handle)


TORN = " <torn>\n"  # closes a line that a killed writer left open


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of `path`. Lines torn by a crash are passed over; any other line that is not JSON raises."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line or line.endswith(TORN.rstrip("\n")):
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error


class RunDir:
    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).resolve()
        self.resolved = self.path / "resolved.yaml"
        self.plan = self.path / "plan.json"
        self.code = self.path / "code"
        self.attempts = self.path / "attempts.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.evals = self.path / "evals"
        self.failures = self.path / "failures"
        self.bad_steps = self.path / "bad_steps.jsonl"
        self.stragglers = self.path / "stragglers.json"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.stop_file = self.path / "control" / "stop"
        self.save_file = self.path / "control" / "save"
        self.done_file = self.path / "DONE"

    @property
    def done(self) -> bool:
        return self.done_file.exists()

    def mark_done(self, step: int) -> None:
        write_atomic(self.done_file, f"step {step}\n")

    def wandb_id(self) -> str:
        """The run's W&B id: drawn once, kept, so that restarts and evaluations land in one W&B run."""
        file = self.path / "wandb_id"
        if not file.exists():
            write_atomic(file, secrets.token_hex(8))
        return file.read_text().strip()

    def start_attempt(self, **facts: Any) -> int:
        """Record that a process group starts; returns the attempt's number, from 1."""
        number = 1 + sum(1 for line in read_lines(self.attempts) if line["event"] == "start")
        append_line(self.attempts, {"event": "start", "attempt": number, "time": time.time(), **facts})
        return number

    def attempt_ended(self, number: int) -> bool:
        """Whether the attempt's end was recorded; a killed one has none."""
        return any(line["event"] == "end" and line["attempt"] == number for line in read_lines(self.attempts))

    def end_attempt(self, number: int, outcome: str, step: int | None, **facts: Any) -> None:
        append_line(
            self.attempts,
            {
                "event": "end",
                "attempt": number,
                "time": time.time(),
                "outcome": outcome,
                "step": step,
                **facts,
            },
        )

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of every complete checkpoint, oldest first."""
        return complete_checkpoints(self.checkpoints)

    def metric_rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl of one kind ("train" or "validation"), by step; a repeated step's last row wins.

        A step is repeated when an attempt was killed after it and the next one resumed before it.
        """
        rows = {row["step"]: row for row in read_lines(self.metrics) if row["kind"] == kind}
        return [rows[step] for step in sorted(rows)]

    def record_code(self, root: Path) -> None:
        """Write the commit and the uncommitted changes of the code that runs."""

        def git(*args: str) -> str:
            result = subprocess.run(
                ["git", "-C", str(root), *args], capture_output=True, text=True, check=False
            )
            return result.stdout if result.returncode == 0 else ""

        write_atomic(self.code / "commit.txt", git("rev-parse", "HEAD") or "not a git checkout\n")
        write_atomic(self.code / "diff.patch", git("diff", "HEAD"))


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every complete checkpoint in `folder`, oldest first; others are not looked at."""
    if not folder.is_dir():
        return []
    found = [(re.fullmatch(r"step-(\d+)", entry.name), entry) for entry in folder.iterdir()]
    return sorted(
        (int(match[1]), entry) for match, entry in found if match and (entry / "manifest.json").exists()
    )
