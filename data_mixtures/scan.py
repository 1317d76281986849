"""Check a source for benchmark items without preparing it: what would be removed, where, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_mixtures.contamination import DocumentHits, summarise
from data_mixtures.decontaminate import Decontaminator
from data_mixtures.documents import Document, Dropped, document
from data_mixtures.records import list_units, read_rows
from data_mixtures.shards import write_json
from data_mixtures.sources import Source, load_source

BATCH_CHARACTERS = 1 << 18


@dataclass
class Scanned:
    """What a scan went through. seconds: CPU time of the checks alone, reading excluded."""

    documents: int = 0
    unusable: int = 0
    characters: int = 0
    seconds: float = 0.0


def scan_source(source: Source, decontaminator: Decontaminator, scanned: Scanned) -> Iterator[DocumentHits]:
    """The documents of `source` that are hit, in order; `scanned` is brought up to date as they come."""
    for batch in _batches(_documents(source, scanned)):
        start = time.process_time()
        found = decontaminator.check_batch([document.text for document in batch])
        scanned.seconds += time.process_time() - start
        scanned.documents += len(batch)
        scanned.characters += sum(len(document.text) for document in batch)
        for one, hits in zip(batch, found, strict=True):
            if hits:
                yield DocumentHits(source.name, one.id, tuple(hits))


def scan_command(values: dict[str, str], _: set[str]) -> int:
    """`scan source=… index=… [report=…]`: print the hits and, where asked, write the report as JSON."""
    source = load_source(values["source"])
    decontaminator = Decontaminator.load(Path(values["index"]))
    scanned, found = Scanned(), []
    for one in scan_source(source, decontaminator, scanned):
        found.append(one)
        first = one.hits[0]
        mark = "removed" if one.removed else "reported only"
        excerpt = " ".join(first.excerpt.split())[:80]
        print(
            f"{one.document} at {first.offset}: {first.benchmark} {first.item} ({first.kind}, {mark}): {excerpt}"
        )
    removed = sum(one.removed for one in found)
    megabytes = scanned.characters / 1e6
    speed = megabytes / scanned.seconds if scanned.seconds else 0.0
    print(
        f"{source.name}: {scanned.documents:,} documents, {megabytes:,.1f}M characters; {removed:,} to remove "
        f"({removed / max(1, scanned.documents):.4%}), {len(found) - removed:,} reported only; "
        f"{scanned.unusable:,} rows are no document; {speed:.0f}M characters a second of CPU time"
    )
    if values.get("report"):
        write_json(Path(values["report"]), {"index": decontaminator.digest, **summarise(found)})
        print(f"report: {values['report']}")
    return 0


def _documents(source: Source, scanned: Scanned) -> Iterator[Document]:
    """Every document of the source; rows that give none are counted, damaged files too."""
    for unit in list_units(source):
        seen: set[object] = set()
        for row in read_rows(source, unit, skip_corrupt=True):
            try:
                yield document(source, row, seen)
            except Dropped:
                scanned.unusable += 1


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for one in documents:
        batch.append(one)
        characters += len(one.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
