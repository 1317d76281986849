"""The last step of a preparation: check every shard against its record and make the source whole."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_mixtures.contamination import DocumentHits, read_hits, summarise, write_hits
from data_mixtures.decontaminate import Hit
from data_mixtures.prepare import ALTERED, SPLITS, Job, begin, check_settings, part_records
from data_mixtures.shards import (
    MANIFEST,
    ShardError,
    file_problem,
    read_manifest,
    write_json,
    write_manifest,
)
from data_mixtures.tokenizer import Tokenizer

HITS = "contamination.jsonl"
HITS_REPORT = "contamination.json"


def is_prepared(job: Job) -> bool:
    """Whether the source is whole. Raises SettingsChanged when it is, but with other settings."""
    if not all((job.directory / split / MANIFEST).exists() for split in SPLITS):
        return False
    check_settings(read_manifest(job.directory / "train")["settings"], job.settings, job.directory)
    return True


def merge(job: Job) -> dict[str, dict[str, Any]]:
    """Write the manifests of a source whose units are all prepared. Returns them by split.

    Raises ShardError that names the units that are missing, or every damaged file.
    """
    begin(job)
    records = [list(part_records(job, k)) for k in range(len(job.units))]
    missing = [k for k, parts in enumerate(records) if not parts or not parts[-1]["last"]]
    if missing:
        shown = ", ".join(f"{k} ({job.units[k].name})" for k in missing[:5])
        raise ShardError(
            f"{job.directory}: {len(missing)} of {len(records)} units are not prepared: {shown}"
            f"{', …' if len(missing) > 5 else ''}; run prepare again for them"
        )
    parts = [part for unit in records for part in unit]
    shards = {split: [p["shards"][split] for p in parts if split in p["shards"]] for split in SPLITS}
    _check_files(job, shards)
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part["counts"])
    if counts["rows"] and counts["null"] == counts["rows"]:
        raise ShardError(
            f"{job.directory}: all {counts['rows']} rows lack the text; correct `columns` in {job.source.file}"
        )
    _write_hits(job, parts)
    manifests = {split: _write_manifest(job, split, shards[split], counts) for split in SPLITS}
    for split in SPLITS:
        for leftover in (job.directory / split).glob("*.tmp"):
            leftover.unlink()
    shutil.rmtree(job.work)
    return manifests


def _check_files(job: Job, shards: dict[str, list[dict[str, Any]]]) -> None:
    problems = [
        problem
        for split, entries in shards.items()
        for entry in entries
        for name, recorded in entry["files"].items()
        if (problem := file_problem(job.directory / split / name, recorded))
    ]
    if problems:
        raise ShardError(
            "; ".join(problems) + f"; remove the records of these shards from {job.work} and prepare again"
        )


def _write_manifest(
    job: Job, split: str, shards: list[dict[str, Any]], counts: Counter[str]
) -> dict[str, Any]:
    tokenizer, source = Tokenizer(job.tokenizer), job.source
    reasons = {reason: n for reason, n in sorted(counts.items()) if reason not in ("rows", *ALTERED)}
    return write_manifest(
        job.directory / split,
        source=source.name,
        split=split,
        origin={
            "kind": source.kind,
            "path": source.path if source.kind == "hub" else None,
            "configs": list(source.configs),
            "revision": source.revision,
            "licence": source.licence,
            "category": source.category,
        },
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        shards=shards,
        rows=counts["rows"],
        dropped=reasons,
        altered={reason: counts[reason] for reason in ALTERED if counts[reason]},
        settings=job.settings,
    )


def _write_hits(job: Job, parts: list[dict[str, Any]]) -> None:
    """The lines of all documents with hits, and the report over them; nothing without decontamination."""
    if job.index is None:
        return

    def found() -> Iterator[DocumentHits]:
        for part in parts:
            for hit in part["hits"]:
                yield DocumentHits(hit["source"], hit["document"], tuple(Hit(**one) for one in hit["hits"]))

    write_hits(job.directory / HITS, found())
    write_json(job.directory / HITS_REPORT, summarise(read_hits([job.directory / HITS])))


def summary(manifests: dict[str, dict[str, Any]], directory: Path) -> str:
    """What a preparation gave, in a few lines."""
    train, held_out = manifests["train"], manifests["validation"]
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in train["dropped"].items()) or "none"
    altered = ", ".join(f"{n:,} {reason}" for reason, n in train["altered"].items()) or "none"
    return (
        f"{directory}: {train['tokens']:,} tokens in {train['documents']:,} documents and "
        f"{len(train['shards'])} shards; held out {held_out['tokens']:,} tokens in {held_out['documents']:,}\n"
        f"of {train['rows']:,} rows: left out {dropped}; altered {altered}"
    )
