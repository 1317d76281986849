"""Raw input, one row at a time: parquet, JSON lines (plain, gzip, zstd), text files, hub data sets.

A source is read in *units*: one file (text files: a thousand of them; hub data sets: one of their files).
Units are what array tasks and processes share out, so the result does not depend on how many of them there
are.

What is damaged is named with its file and place. It ends the run (`CorruptInput`), or, with `skip_corrupt`,
comes as a row that says why it cannot be used.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from data_mixtures.sources import Source

TEXT_FILES_PER_UNIT = 1000
PARQUET_BATCH = 256


class CorruptInput(ValueError):
    """Damaged input; the message names the file and the place in it."""


@dataclass(frozen=True)
class Unit:
    """A part of a source. `name` identifies it in messages and records, `size` is its share of the work.

    Names of files are relative to `base`, so that records do not depend on where the data lies.
    """

    name: str
    size: int
    base: Path = Path()
    files: tuple[Path, ...] = ()
    config: str | None = None
    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Row:
    """One row as found. `place` says where; `broken` why it cannot be used (then there are no fields).

    `progress` is how much of the unit has been read, 0 to 1.
    """

    place: str
    fields: dict[str, Any]
    progress: float = 0.0
    broken: str | None = None


def list_units(source: Source) -> list[Unit]:
    """The units of a source, in a fixed order. Raises SourceError when it has none, ValueError when
    unreadable.
    """
    if source.kind == "hub":
        return [unit for config in source.configs or (None,) for unit in _hub_units(source, config)]
    files = source.files()
    base = files[0].parent if len(files) == 1 else Path(*_common_parts(files))
    if source.kind == "text":
        groups = [files[i : i + TEXT_FILES_PER_UNIT] for i in range(0, len(files), TEXT_FILES_PER_UNIT)]
    else:
        groups = [[file] for file in files]
    return [
        Unit(
            name=group[0].relative_to(base).as_posix(),
            size=sum(file.stat().st_size for file in group),
            base=base,
            files=tuple(group),
        )
        for group in groups
    ]


def read_rows(source: Source, unit: Unit, skip_corrupt: bool) -> Iterator[Row]:
    """The rows of one unit, in order. Raises CorruptInput, unless it is to be skipped."""
    readers = {"parquet": _parquet_rows, "jsonl": _json_rows, "text": _text_rows, "hub": _hub_rows}
    try:
        for row in readers[source.kind](source, unit):
            if row.broken in _CORRUPT and not skip_corrupt:
                raise CorruptInput(
                    f"{unit.base / row.place}: {_CORRUPT[row.broken]}; repair it, or pass --skip-corrupt"
                )
            yield row
    except OSError as error:
        raise CorruptInput(f"{unit.name}: cannot be read: {error}") from error


# Kinds of damage that end a run unless skipped.
_CORRUPT = {
    "corrupt_line": "this line is no JSON object",
    "corrupt_file": "the file is damaged or cut off here, and what follows is lost",
}


def _json_rows(source: Source, unit: Unit) -> Iterator[Row]:
    [path] = unit.files
    offset = 0
    with path.open("rb") as raw:
        lines = _decompressed(path, raw)
        number = 0
        while True:
            place = f"{unit.name}:{number + 1} (byte {offset})"
            try:
                line = lines.readline()
            except (OSError, EOFError, zlib.error):
                yield Row(place, {}, 1.0, "corrupt_file")
                return
            if not line:
                return
            number += 1
            offset += len(line)
            if line.strip():
                yield _json_row(line, place, raw.tell() / max(1, unit.size))


def _json_row(line: bytes, place: str, progress: float) -> Row:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Row(place, {}, progress, "invalid_utf8")
    except (json.JSONDecodeError, RecursionError):
        return Row(place, {}, progress, "corrupt_line")
    if not isinstance(fields, dict):
        return Row(place, {}, progress, "corrupt_line")
    return Row(place, fields, progress)


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if path.name.endswith(".zst"):
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(stream)  # type: ignore[arg-type,return-value]
    return raw


def _parquet_rows(source: Source, unit: Unit) -> Iterator[Row]:
    [path] = unit.files
    wanted = list(source.columns.values())
    row_number = 0
    try:
        with pq.ParquetFile(path) as file:
            missing = [column for column in wanted if column not in file.schema_arrow.names]
            if missing:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}; it has {', '.join(file.schema_arrow.names)}; "
                    f"correct `columns` in {source.file}"
                )
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH, columns=wanted):
                for fields in _decoded(batch):
                    place = f"{unit.name} row {row_number}"
                    row_number += 1
                    broken = fields.pop("", None)
                    yield Row(place, fields, row_number / total, broken)
    except (pa.ArrowException, OSError) as error:
        yield Row(f"{unit.name} row {row_number} ({error})", {}, 1.0, "corrupt_file")


def _decoded(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a batch; a row with bytes that are no UTF-8 as {"": reason}."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield {"": "invalid_utf8"}


def _text_rows(source: Source, unit: Unit) -> Iterator[Row]:
    for i, path in enumerate(unit.files):
        place, progress = path.relative_to(unit.base).as_posix(), (i + 1) / len(unit.files)
        try:
            yield Row(place, {"text": path.read_bytes().decode("utf-8-sig")}, progress)
        except UnicodeDecodeError:
            yield Row(place, {}, progress, "invalid_utf8")


def _hub_units(source: Source, config: str | None) -> list[Unit]:
    count = _hub_data(source, config).num_shards
    label = f"{source.path}/{config}" if config else source.path
    return [Unit(f"{label} {i}/{count}", 1, config=config, index=i, count=count) for i in range(count)]


def _hub_rows(source: Source, unit: Unit) -> Iterator[Row]:
    data = _hub_data(source, unit.config)
    wanted = list(source.columns.values())
    known = list(data.features or [])
    missing = [column for column in wanted if known and column not in known]
    if missing:
        raise ValueError(
            f"{source.path} has no column {', '.join(missing)}; it has {', '.join(known)}; correct `columns` in "
            f"{source.file}"
        )
    for i, fields in enumerate(data.shard(num_shards=unit.count, index=unit.index)):
        yield Row(f"{unit.name} row {i}", fields)


def _hub_data(source: Source, config: str | None) -> Any:
    """A streaming data set. A folder in place of a hub id needs no revision."""
    import datasets  # takes a second, and only hub data sets need it
    from datasets.exceptions import DatasetsError

    revision = None if Path(source.path).is_dir() else source.pinned_revision()
    try:
        return datasets.load_dataset(
            source.path, config, split=source.split, revision=revision, streaming=True
        )
    except (DatasetsError, ConnectionError, OSError, ValueError) as error:
        raise ValueError(
            f"{source.file}: the hub data set {source.path!r} (config {config}, split {source.split}, revision "
            f"{revision}) cannot be opened: {error}"
        ) from error


def _common_parts(files: list[Path]) -> tuple[str, ...]:
    """The folders that all files share."""
    shared: list[str] = []
    for parts in zip(*(file.parent.parts for file in files), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return tuple(shared)
