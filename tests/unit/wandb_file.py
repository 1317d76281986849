"""Read what W&B wrote offline: a .wandb file is a LevelDB log of protobuf records."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32768  # of the file, and of the log
FULL, FIRST, LAST = 1, 2, 4


def records(file: Path) -> Iterator[Any]:
    """The protobuf records in order."""
    record_class: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    raw = file.read_bytes()
    assert raw.startswith(b":W&B")
    position, parts = HEADER, []
    while position + 7 <= len(raw):
        if (
            BLOCK - position % BLOCK < 7
        ):  # too little room for a record's head: the rest of the block is empty
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", raw[position : position + 7])
        parts = [] if kind in (FULL, FIRST) else parts
        parts.append(raw[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (FULL, LAST):
            record = record_class()
            record.ParseFromString(b"".join(parts))
            yield record


def values(items: Any) -> dict[str, Any]:
    """A record's items by key; nested keys are joined by dots."""
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
