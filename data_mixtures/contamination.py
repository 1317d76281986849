"""What decontamination found: one line per document that was hit, and the report over all of them.

A line is written for every document with a hit, removed or not, so that a report can be made again, and each
removal looked at, without reading the corpus again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_mixtures.decontaminate import Hit, contaminated
from data_mixtures.shards import write_atomically

PLACES = 5  # documents named per benchmark item


@dataclass(frozen=True)
class DocumentHits:
    """The hits of one document of a source; `document` is its id in the data."""

    source: str
    document: str
    hits: tuple[Hit, ...]

    @property
    def removed(self) -> bool:
        """Whether it must not be trained on."""
        return contaminated(self.hits)


def write_hits(path: Path, found: Iterable[DocumentHits]) -> dict[str, Any]:
    """Write one JSON line per document, atomically. Returns {"bytes", "sha256"} of the file."""
    return write_atomically(
        path, ((json.dumps({**asdict(one), "removed": one.removed}) + "\n").encode() for one in found)
    )


def read_hits(paths: Iterable[Path]) -> Iterator[DocumentHits]:
    """Read what `write_hits` wrote. Raises ValueError that names file and line where it is something else."""
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                    hits = tuple(Hit(**hit) for hit in record["hits"])
                    yield DocumentHits(record["source"], record["document"], hits)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}: line {number} is no record of hits ({error})") from error


def summarise(found: Iterable[DocumentHits]) -> dict[str, Any]:
    """The report, ready for JSON.

    sources: per source, documents removed and documents only reported, and documents per kind of hit.
    items: per benchmark and item, how many documents hold it, by kind, and the places of the first `PLACES`.
    """
    sources: dict[str, Counter[str]] = defaultdict(Counter)
    items: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in found:
        sources[one.source]["removed" if one.removed else "reported only"] += 1
        sources[one.source].update({hit.kind for hit in one.hits})
        seen: set[tuple[str, str]] = set()
        for hit in one.hits:
            entry = items[hit.benchmark].setdefault(hit.item, {"documents": 0, "kinds": {}, "places": []})
            if (hit.benchmark, hit.item) not in seen:
                seen.add((hit.benchmark, hit.item))
                entry["documents"] += 1
                if len(entry["places"]) < PLACES:
                    place = {"source": one.source, "document": one.document, "offset": hit.offset}
                    entry["places"].append({**place, "kind": hit.kind, "excerpt": hit.excerpt})
            entry["kinds"][hit.kind] = entry["kinds"].get(hit.kind, 0) + 1
    return {"sources": {name: dict(counts) for name, counts in sources.items()}, "items": dict(items)}
