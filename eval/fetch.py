"""Fill a folder with the CORE task files, each checked before it is kept.

The files lie in llm-foundry's repository, whose layout `source` is expected to have; a flat folder or mirror,
plain or gzipped, will do too. core_files.json knows the SHA-256 of each uncompressed file. SQuAD's was never
seen by us in full: it is checked by its number of items.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from eval.core_tasks import CORE, Task
from eval.results import write_atomic

FILES: dict[str, dict[str, str | None]] = json.loads(
    (Path(__file__).parent / "core_files.json").read_text(encoding="utf-8")
)
TIMEOUT = 60  # seconds without an answer


def fetch_core(source: str, folder: Path, say: Callable[[str], None] = print) -> int:
    """Bring every missing file into `folder`; how many could not be had. Files there that check are kept."""
    failed = 0
    for name in FILES:
        target = folder / f"{name}.jsonl"
        if target.exists() and _fault(name, target.read_bytes()) is None:
            say(f"{target}: there")
            continue
        try:
            raw = _download(source, name)
        except OSError as error:
            say(f"{target}: not fetched: {error}")
            failed += 1
            continue
        fault = _fault(name, raw)
        if fault:
            say(f"{target}: not kept: {fault}")
            failed += 1
            continue
        write_atomic(target, raw.decode("utf-8"))
        say(f"{target}: fetched, {len(raw):,} bytes")
    return failed


def _download(source: str, name: str) -> bytes:
    """The uncompressed file from the first place below `source` that has it. Raises OSError."""
    places = [f"{FILES[name]['folder']}/{name}.jsonl", f"{name}.jsonl"]
    problems = []
    for place in [*places, *(f"{place}.gz" for place in places)]:
        url = f"{source.rstrip('/')}/{place}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                raw = answer.read()
            return gzip.decompress(raw) if place.endswith(".gz") else raw
        except (urllib.error.URLError, OSError, EOFError) as error:
            problems.append(f"{url}: {error}")
    raise OSError("; ".join(problems))


def _fault(name: str, raw: bytes) -> str | None:
    """Why a file is not the one that CORE means, or None."""
    expected = FILES[name]["sha256"]
    digest = hashlib.sha256(raw).hexdigest()
    if expected is not None:
        return None if digest == expected else f"its SHA-256 is {digest}, not {expected}"
    items = sum(1 for line in raw.split(b"\n") if line.strip())
    wanted = _task(name).items
    return None if items == wanted else f"it has {items} items, not {wanted}"


def _task(name: str) -> Task:
    return next(task for task in CORE.values() if task.file == name)
