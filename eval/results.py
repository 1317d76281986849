"""Files of an evaluation, and the names in a run directory that evaluation reads and writes.

    runs/<name>/
        checkpoints/step-N/manifest.json      complete when it is there
        evals/step-N.json                     all suites' results of one checkpoint; also what has been done
        evals/step-N/<suite>-<hash>/          per-item lines and whatever else a suite keeps
        metrics.jsonl                         gets rows of kind "eval"
        wandb_id                              the run's fixed W&B id
        DONE                                  training has ended

A suite counts as done for a step when step-N.json holds an entry with its name and settings hash. There is no
second list that could disagree with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORMAT = "laneformer-eval"
VERSION = 1
PACKAGES = ("torch", "numpy", "sentencepiece", "transformers", "evalplus")


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line in a single write; a line that a killed writer left open is closed first."""
    append_lines(path, [record])


def append_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, (TORN + text if torn else text).encode())
    finally:
        os.close(handle)


TORN = " <torn>\n"  # how the run directory marks a line that a killed writer left open


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of `path`, none if it is absent. Lines torn by a crash are passed over; others that are
    not JSON raise ValueError."""
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


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def settings_hash(suite: str, settings: dict[str, Any]) -> str:
    """Eight hex digits that identify a suite's settings."""
    text = json.dumps([suite, settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def package_versions() -> dict[str, str]:
    """Versions of the packages that numbers may depend on, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class RunFiles:
    """The parts of a run directory that evaluation uses."""

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.checkpoints = self.path / "checkpoints"
        self.evals = self.path / "evals"
        self.metrics = self.path / "metrics.jsonl"
        self.resolved = self.path / "resolved.yaml"
        self.tensorboard = self.path / "tensorboard"
        self.done_file = self.path / "DONE"

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of every complete checkpoint, oldest first; others are not looked at."""
        if not self.checkpoints.is_dir():
            return []
        found = [(re.fullmatch(r"step-(\d+)", entry.name), entry) for entry in self.checkpoints.iterdir()]
        return sorted(
            (int(match[1]), entry) for match, entry in found if match and (entry / "manifest.json").exists()
        )

    def result_file(self, step: int) -> Path:
        return self.evals / f"step-{step}.json"

    def suite_folder(self, step: int, suite: str, digest: str) -> Path:
        return self.evals / f"step-{step}" / f"{suite}-{digest}"

    def results(self) -> list[dict[str, Any]]:
        """The contents of every step-N.json, by step."""
        files = self.evals.glob("step-*.json") if self.evals.is_dir() else []
        return sorted((read_result(file) for file in files), key=lambda result: result["step"])

    def is_done(self, step: int, suite: str, digest: str) -> bool:
        file = self.result_file(step)
        return file.exists() and any(
            (entry["suite"], entry["settings_hash"]) == (suite, digest)
            for entry in read_result(file)["suites"]
        )

    def record(self, step: int, checkpoint: dict[str, Any], entry: dict[str, Any]) -> None:
        """Add one suite's entry to step-N.json; several processes may do so for different suites at once."""
        with locked(self.evals / ".lock"):
            file = self.result_file(step)
            if file.exists():
                result = read_result(file)
            else:
                result = {"format": FORMAT, "version": VERSION, "step": step, "checkpoint": checkpoint}
                result["suites"] = []
            result["suites"].append(entry)
            write_atomic(file, json.dumps(result, indent=1) + "\n")

    def wandb_id(self) -> str:
        """The run's W&B id, drawn here when the run has none yet."""
        file = self.path / "wandb_id"
        if not file.exists():
            write_atomic(file, secrets.token_hex(8))
        return file.read_text().strip()


def read_result(file: Path) -> dict[str, Any]:
    """One step-N.json. Raises ValueError when the file is of another format or a newer version."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        kind, version = result["format"], result["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no evaluation result: {error!r}") from error
    if kind != FORMAT or version != VERSION:
        raise ValueError(
            f"{file} is {kind} version {version}, but this code reads {FORMAT} version {VERSION}; "
            "move it away to evaluate again"
        )
    return result


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path`; without `wait`, raises BlockingIOError when another process has it.

    The system drops it with the process, however that ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
