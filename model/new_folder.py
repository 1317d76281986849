"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_existing(out: Path) -> None:
    """Raise ValueError if `out` exists and is anything but an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"out={out} exists already; name a new folder, or remove it first")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a temporary folder beside `out` to fill; when all went well, sync it and rename it to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        temporary.rename(out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
