"""Text to verified shards, once: read, filter, decontaminate, tokenise, write, merge.

The work is split twice. A source has *units* (see `records.py`), which processes and array tasks share out. A
unit is written in *parts*, one shard each (and a small one of held-out documents); after every part a record
says how far the unit has come, so an interrupted run continues behind the last whole part. Where parts end
depends on the content alone, so any number of interruptions, processes and tasks gives the same bytes.

    <root>/<source>/work/settings.json        what the preparation depends on; another one is refused
    <root>/<source>/work/unit-00003-001.json  record of a part; the last of a unit says so

`merge.py` checks every file against the records, writes the manifests and removes `work`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_mixtures.chat import JINJA_TEMPLATE
from data_mixtures.contamination import DocumentHits
from data_mixtures.decontaminate import Decontaminator, contaminated
from data_mixtures.documents import Document, Dropped, chunks, document, encode_limited
from data_mixtures.records import Row, Unit, list_units, read_rows
from data_mixtures.shards import ShardWriter, read_json, token_dtype, write_atomically, write_json
from data_mixtures.sources import Source
from data_mixtures.tokenizer import Tokenizer

SPLITS = ("train", "validation")
BATCH_CHARACTERS = 1 << 16  # text that is checked and tokenised together
ALTERED = ("chunked", "cut_at_turn")  # counted, but not left out
DEFAULT_SHARD_TOKENS = 1 << 27


class SettingsChanged(ValueError):
    """A preparation was begun or finished with other settings; the message names them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One preparation: everything that decides its output.

    root: folder of the prepared sources. tokenizer: a SentencePiece model. held_out: share of documents kept
    for validation, chosen by a hash of the text. max_tokens: limit of a conversation. index: a saved
    Decontaminator.
    shard_tokens: a shard is closed when it has as many.
    """

    source: Source
    root: Path
    tokenizer: Path
    held_out: float = 0.001
    max_tokens: int | None = None
    skip_corrupt: bool = False
    index: Path | None = None
    shard_tokens: int = DEFAULT_SHARD_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; it must be at least 0 and below 1")
        if self.shard_tokens < 1:
            raise ValueError(f"shard_tokens is {self.shard_tokens}; it must be at least 1")

    @property
    def directory(self) -> Path:
        return self.root / self.source.name

    @property
    def work(self) -> Path:
        return self.directory / "work"

    @cached_property
    def units(self) -> list[Unit]:
        return list_units(self.source)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the output depends on, in plain JSON types."""
        source = {
            k: v for k, v in asdict(self.source).items() if k not in ("file", "expected_tokens", "access")
        }
        if self.source.kind != "hub":
            del source["path"]  # the units' names and sizes say what was read, wherever it lay
        settings = {
            "source": source,
            "units": [[unit.name, unit.size] for unit in self.units],
            "tokenizer": Tokenizer(self.tokenizer).sha256,
            "held_out": self.held_out,
            "max_tokens": self.max_tokens,
            "skip_corrupt": self.skip_corrupt,
            "decontamination": hashlib.sha256(self.index.read_bytes()).hexdigest() if self.index else None,
            "shard_tokens": self.shard_tokens,
        }
        return json.loads(json.dumps(settings))  # as it will be read back: lists for tuples


def begin(job: Job) -> None:
    """Create the work folder, or check that it belongs to these settings. Raises SettingsChanged."""
    path = job.work / "settings.json"
    if not path.exists():
        for folder in (job.work, *(job.directory / split for split in SPLITS)):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(path, job.settings)
        return
    check_settings(read_json(path), job.settings, job.directory)


def install_tokenizer(job: Job) -> None:
    """Keep the tokenizer and the chat template beside the sources. Raises ValueError when another one is
    there.
    """
    if not job.tokenizer.exists():
        raise ValueError(
            f"{job.tokenizer} does not exist; give tokenizer=, the path of a SentencePiece model"
        )
    job.root.mkdir(parents=True, exist_ok=True)
    target = job.root / "tokenizer.model"
    if not target.exists():
        write_atomically(target, [job.tokenizer.read_bytes()])
    elif Tokenizer(target).sha256 != Tokenizer(job.tokenizer).sha256:
        raise ValueError(
            f"{target} is another tokenizer than {job.tokenizer}; all sources under {job.root} share one, so use "
            "it, or another root"
        )
    write_atomically(job.root / JINJA_TEMPLATE.name, [JINJA_TEMPLATE.read_bytes()])


def check_settings(before: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    """Raise SettingsChanged, naming what differs, unless both are equal."""
    changed = [
        f"{key}: {_short(before.get(key))} → {_short(now.get(key))}"
        for key in now
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise SettingsChanged(
            f"{directory} was prepared with other settings: {'; '.join(changed)}. Use the same ones, or remove the "
            "folder to prepare it anew"
        )


class UnitPreparer:
    """Prepares units of a job, one after the other. Loads tokenizer and decontamination index once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokenizer = Tokenizer(job.tokenizer)
        self._decontaminator = Decontaminator.load(job.index) if job.index else None

    def run(self, unit_index: int, report: Callable[[float, int], None]) -> None:
        """Prepare one unit, from behind its last whole part.

        `report(progress, tokens)` is called now and then: share of the unit that was read, tokens written
        since.
        """
        parts = list(part_records(self._job, unit_index))
        if parts and parts[-1]["last"]:
            report(1.0, 0)
            return
        skip = parts[-1]["rows"] if parts else 0
        seen: set[Any] = set()
        part = _Part(self._job, self._tokenizer, self._decontaminator, unit_index, len(parts))
        number = 0
        for number, row in enumerate(self._rows(unit_index), start=1):
            if number <= skip:
                _remember_id(self._job.source, row, seen)
                continue
            part.add(row, seen)
            if part.is_batch_full:
                report(row.progress, part.flush())
                if part.tokens >= self._job.shard_tokens:
                    part.close(rows=number, last=False)
                    part = _Part(
                        self._job, self._tokenizer, self._decontaminator, unit_index, part.number + 1
                    )
        report(1.0, part.flush())
        part.close(rows=number, last=True)

    def _rows(self, unit_index: int) -> Iterator[Row]:
        return read_rows(self._job.source, self._job.units[unit_index], self._job.skip_corrupt)


class _Part:
    """One shard in the making: documents waiting to be tokenised, and what has been written and counted."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        decontaminator: Decontaminator | None,
        unit_index: int,
        number: int,
    ) -> None:
        self.number = number
        self._job = job
        self._tokenizer = tokenizer
        self._decontaminator = decontaminator
        self._unit_index = unit_index
        self._counts: Counter[str] = Counter()
        self._hits: list[DocumentHits] = []
        self._waiting: list[Document] = []
        self._waiting_characters = 0
        stem = f"shard-{unit_index:05d}-{number:03d}"
        dtype = token_dtype(tokenizer.vocab_size)
        self._writers = {split: ShardWriter(job.directory / split, stem, dtype) for split in SPLITS}

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self._writers.values())

    @property
    def is_batch_full(self) -> bool:
        return self._waiting_characters >= BATCH_CHARACTERS

    def add(self, row: Row, seen: set[Any]) -> None:
        """Take the document of a row, or count why there is none."""
        self._counts["rows"] += 1
        try:
            found = document(self._job.source, row, seen)
        except Dropped as reason:
            self._counts[str(reason)] += 1
            return
        self._waiting.append(found)
        self._waiting_characters += len(found.text)

    def flush(self) -> int:
        """Check, tokenise and store the waiting documents. Returns the tokens stored."""
        before = self.tokens
        texts: list[tuple[str, str]] = []  # split, text
        for found in self._decontaminated():
            split = held_out_split(found.text, self._job.held_out)
            if found.messages is not None:
                self._store_conversation(split, found)
                continue
            pieces = list(chunks(found.text))
            self._counts["chunked"] += len(pieces) > 1
            texts += [(split, piece) for piece in pieces]
        bos, eos = self._tokenizer.bos_id, self._tokenizer.eos_id
        encoded = self._tokenizer.encode_batch([text for _, text in texts])
        for (split, text), ids in zip(texts, encoded, strict=True):
            self._writers[split].add([bos, *ids, eos], len(text.encode()))
        self._waiting, self._waiting_characters = [], 0
        return self.tokens - before

    def close(self, rows: int, last: bool) -> None:
        """Write the shards and then the record. `rows` of the unit have been read by now; `last`: all of
        them.
        """
        shards = {split: writer.close() for split, writer in self._writers.items() if writer.documents}
        record = {
            "rows": rows,
            "last": last,
            "shards": shards,
            "counts": {reason: n for reason, n in sorted(self._counts.items()) if n},
            "hits": [asdict(hit) for hit in self._hits],
        }
        write_json(part_record(self._job, self._unit_index, self.number), record)

    def _decontaminated(self) -> list[Document]:
        if self._decontaminator is None:
            return self._waiting
        kept = []
        found = self._decontaminator.check_batch([waiting.text for waiting in self._waiting])
        for waiting, hits in zip(self._waiting, found, strict=True):
            if hits:
                self._hits.append(DocumentHits(self._job.source.name, waiting.id, tuple(hits)))
            if contaminated(hits):
                self._counts["contaminated"] += 1
            else:
                kept.append(waiting)
        return kept

    def _store_conversation(self, split: str, found: Document) -> None:
        try:
            ids, mask, cut = encode_limited(self._tokenizer, found.messages or (), self._job.max_tokens)
        except Dropped as reason:
            self._counts[str(reason)] += 1
            return
        self._counts["cut_at_turn"] += cut
        self._writers[split].add(ids, len(found.text.encode()), mask)


def held_out_split(text: str, share: float) -> str:
    """The split a text belongs to: by a hash of it, so that equal texts are on the same side."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "validation" if place < share else "train"


def part_record(job: Job, unit_index: int, number: int) -> Path:
    return job.work / f"unit-{unit_index:05d}-{number:03d}.json"


def part_records(job: Job, unit_index: int) -> Iterator[dict[str, Any]]:
    """The records of a unit's whole parts, in order."""
    number = 0
    while (path := part_record(job, unit_index, number)).exists():
        yield read_json(path)
        number += 1


def _remember_id(source: Source, row: Row, seen: set[Any]) -> None:
    """Note the id of a row that an earlier part has used."""
    try:
        document(source, row, seen)
    except Dropped:
        return


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
