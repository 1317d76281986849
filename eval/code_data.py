"""The code benchmarks: HumanEval+ v0.1.10, MBPP+ v0.2.0 and the built-in problems.

The data is brought by the user, or fetched from evalplus' own releases, and checked against the checksum of
the version that the pinned evalplus was released with.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.builtin_problems import dataset as builtin_dataset

RELEASES = "https://github.com/evalplus/{name}_release/releases/download/{version}/{file}"


@dataclass(frozen=True)
class Source:
    dataset: str
    """evalplus' name, which selects its prompts' stops and its special comparisons."""
    file: str
    version: str
    sha256: str
    """Of the uncompressed lines."""
    cannot_pass: frozenset[str] = frozenset()
    """Tasks that the runner fails whatever the solution is."""


SOURCES = {
    "humaneval": Source(
        "humaneval",
        "HumanEvalPlus.jsonl.gz",
        "v0.1.10",
        "42526ec0e7d5f3ee0b06d6ced98f8c8bae3d76519151bfb3d36f79010645bd7f",
        frozenset({"HumanEval/32"}),
    ),
    "mbpp": Source(
        "mbpp",
        "MbppPlus.jsonl.gz",
        "v0.2.0",
        "b54e762755248ca411b523c917fa9f93c07b5ff2966bf60b3917b853926a3dad",
    ),
}
NAMES = ("humaneval", "mbpp", "builtin")


@dataclass(frozen=True)
class Problem:
    task_id: str
    line: str
    """Its line of the data file."""
    row: dict[str, Any]

    @property
    def reference(self) -> str:
        """The whole program that the benchmark calls right."""
        return self.row["prompt"] + self.row["canonical_solution"]


@dataclass(frozen=True)
class Benchmark:
    name: str
    dataset: str
    version: str
    sha256: str
    problems: dict[str, Problem]
    cannot_pass: frozenset[str]


def load(name: str, folder: Path | None = None) -> Benchmark:
    """One of NAMES. `folder` holds the data files, gzipped or not; the built-in problems need none.

    Raises ValueError for an unknown name and for data of another version, FileNotFoundError without the data.
    """
    if name == "builtin":
        text = builtin_dataset()
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Benchmark(name, "humaneval", digest[:8], digest, _problems(text), frozenset())
    if name not in SOURCES:
        raise ValueError(f"there is no code benchmark {name!r}; there are {', '.join(NAMES)}")
    source = SOURCES[name]
    path = _find(source, folder)
    contents = path.read_bytes()
    text = (gzip.decompress(contents) if path.suffix == ".gz" else contents).decode()
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != source.sha256:
        raise ValueError(
            f"{path} is not {source.file} {source.version}: its lines have sha256 {digest[:16]}…, and not "
            f"{source.sha256[:16]}…; get it with `python -m eval fetch code`"
        )
    return Benchmark(name, source.dataset, source.version, digest, _problems(text), source.cannot_pass)


def fetch(name: str, folder: Path, url: str | None = None) -> Path:
    """Download the data of `name` into `folder` unless it is there; returns its path.

    Raises ValueError when what came is not the version expected (nothing is kept then), URLError offline.
    """
    source = SOURCES[name]
    path = folder / source.file
    if not path.exists():
        release = RELEASES.format(
            name=source.file.partition(".")[0].lower(), version=source.version, file=source.file
        )
        with urllib.request.urlopen(url or release, timeout=60) as response:
            contents = response.read()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    try:
        load(name, folder)
    except (ValueError, OSError):
        path.unlink()
        raise
    return path


def _find(source: Source, folder: Path | None) -> Path:
    for file in (source.file, source.file.removesuffix(".gz")):
        if folder is not None and (folder / file).is_file():
            return folder / file
    where = f"in {folder}" if folder else "given"
    raise FileNotFoundError(
        f"no {source.file} ({source.version}) {where}; get it with `python -m eval fetch code`, or name the "
        "folder that has it"
    )


def _problems(text: str) -> dict[str, Problem]:
    rows = [(line + "\n", json.loads(line)) for line in text.split("\n") if line.strip()]
    return {row["task_id"]: Problem(row["task_id"], line, row) for line, row in rows}
