"""Find benchmark items in training text: 13-grams of words, and the functions that code tasks ask for.

Words are normalised as data_mixtures/ngrams.py says. A document is hit by
- prompt: one 13-gram of an item's question with its answer, of a task's description or of its tests;
- solution: a run of words of a reference solution, `SOLUTION_WORDS` of them or the whole, whichever is less:
  13 words of code can be idiom;
- signature: a definition of the function that a task asks for, with the same parameter names or the same
  annotations. A name of few telling words (`is_prime(n)`) belongs to everybody: it needs a 6-gram of the
  task's prompt nearby as well; so do other parameters of the same number;
- passage: a 13-gram of public prose that a task quotes. It is reported, but no reason to remove a document.

Ignored are rows of numbers or letters (13-grams with fewer than three words of two characters and a letter) and
instructions around the items (13-grams that more than 50 items share). Items of fewer than 13 words are out of
reach: `Decontaminator.coverage` counts them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from data_mixtures.benchmarks import Item, Signature, find_head, find_signature, read_benchmarks
from data_mixtures.ngrams import GramIndex, Texts, normalise
from data_mixtures.shards import write_atomically

WORDS = 13
SOLUTION_WORDS = 24
TEMPLATE_ITEMS = 50
NEAR_WORDS = 6
NEAR_ITEMS = 2  # a 6-gram that more items share is a way of speaking ("write a function to find the")
NEAR_CHARACTERS = (600, 1500)  # before and after a definition
TELLING_WORDS = 4  # a name and its parameters with so many different words of 3 letters is a hit on its own

Kind = Literal["prompt", "solution", "signature", "passage"]

_EXCERPT = 240  # characters
_FORMAT = "laneformer-decontamination-1"
_SETTINGS = {"words": WORDS, "template_items": TEMPLATE_ITEMS, "near": [NEAR_WORDS, NEAR_ITEMS]}
_DEFINITION = re.compile(r"def\s+([A-Za-z_]\w*)\s*\(")


@dataclass(frozen=True)
class Hit:
    """One benchmark item found in one document. `offset` counts characters of the document."""

    benchmark: str
    item: str
    kind: Kind
    excerpt: str
    offset: int


def contaminated(hits: Iterable[Hit]) -> bool:
    """Whether a document with these hits must not be trained on."""
    return any(hit.kind != "passage" for hit in hits)


@dataclass(frozen=True)
class Coverage:
    """How many items of a benchmark can be found, and by what."""

    items: int
    by_prompt: int
    by_solution: int
    by_signature: int
    out_of_reach: int


@dataclass(frozen=True)
class _State:
    """What a Decontaminator knows. A piece is one text of an item: of the index, or (near) of its prompt."""

    items: list[tuple[str, str, Signature | None]]  # benchmark, name, signature
    piece_owners: list[int]
    piece_kinds: list[Kind]
    index: GramIndex
    near_owners: list[int]
    near: GramIndex

    def content(self) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Everything, as arrays and texts."""
        items = [
            (benchmark, name, signature and astuple(signature)) for benchmark, name, signature in self.items
        ]
        texts = {
            "format": _FORMAT,
            "settings": json.dumps(_SETTINGS),
            "items": json.dumps(items),
            "piece_kinds": json.dumps(self.piece_kinds),
        }
        arrays = {
            "piece_owners": np.array(self.piece_owners, np.int64),
            "near_owners": np.array(self.near_owners, np.int64),
            **{f"index.{key}": value for key, value in self.index.arrays().items()},
            **{f"near.{key}": value for key, value in self.near.arrays().items()},
        }
        return arrays, texts

    @classmethod
    def from_file(cls, path: Path) -> _State:
        """From a saved index. Raises ValueError that says what does not fit, OSError when there is none."""
        arrays, texts = _read_safetensors(path)
        if texts.get("format") != _FORMAT:
            raise ValueError(f"is no decontamination index (format {texts.get('format')!r}, not {_FORMAT!r})")
        checksum = texts.pop("sha256", "")
        if checksum != _digest(arrays, texts):
            raise ValueError("does not match its own checksum: the file is damaged; build it again")
        if json.loads(texts["settings"]) != _SETTINGS:
            raise ValueError(f"was built with {texts['settings']}, this version uses {json.dumps(_SETTINGS)}")
        items = [
            (benchmark, name, signature and Signature(signature[0], tuple(signature[1]), tuple(signature[2])))
            for benchmark, name, signature in json.loads(texts["items"])
        ]
        index, near = (
            GramIndex(words, *(arrays[f"{part}.{key}"] for key in GramIndex.ARRAYS))
            for part, words in (("index", WORDS), ("near", NEAR_WORDS))
        )
        owners, near_owners = arrays["piece_owners"].tolist(), arrays["near_owners"].tolist()
        return cls(items, owners, json.loads(texts["piece_kinds"]), index, near_owners, near)


def _digest(arrays: dict[str, np.ndarray], texts: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and record of an index file. Raises ValueError when it is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            record = (file.metadata() or {}).get("decontamination", "{}")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(record)  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"is no decontamination index ({error})") from error


class Decontaminator:
    """Checks documents against benchmark items. Immutable; safe to share with forked workers."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._items = state.items
        self._index = state.index
        self._near = state.near
        self._by_name: dict[str, list[tuple[int, Signature]]] = defaultdict(list)
        for number, (_, _, signature) in enumerate(state.items):
            if signature is not None:
                self._by_name[signature.name].append((number, signature))
        self._piece_words = self._index.words_of_texts()
        self.digest = _digest(*state.content())  # SHA-256 of all it checks for and how, to be put on record

    @classmethod
    def from_files(cls, paths: Iterable[Path]) -> Decontaminator:
        """Build from benchmark files (see `read_benchmarks` for the layouts and errors)."""
        return cls.from_items(read_benchmarks(paths))

    @classmethod
    def from_items(cls, items: Sequence[Item]) -> Decontaminator:
        """Build from items. A passage that several items of a benchmark quote is kept once, for the first."""
        pieces: dict[tuple[str, str, int], tuple[int, str, str]] = {}
        for number, item in enumerate(items):
            for kind, text in item.pieces:
                key = (item.benchmark, text, -1 if kind == "passage" else number)
                pieces.setdefault(key, (number, kind, text))
        owners, kinds, texts = zip(*pieces.values(), strict=True) if pieces else ((), (), ())
        near = [
            (number, part)
            for number, item in enumerate(items)
            if item.signature is not None
            for kind, text in item.pieces
            if kind == "prompt"
            for part in _without_head(text, item.signature.name)
        ]
        state = _State(
            items=[(item.benchmark, item.name, item.signature) for item in items],
            piece_owners=list(owners),
            piece_kinds=list(kinds),
            index=GramIndex.build(texts, owners, WORDS, TEMPLATE_ITEMS),
            near_owners=[number for number, _ in near],
            near=GramIndex.build([t for _, t in near], [n for n, _ in near], NEAR_WORDS, NEAR_ITEMS),
        )
        return cls(state)

    @classmethod
    def load(cls, path: Path) -> Decontaminator:
        """Read what `save` wrote. Raises ValueError that names a missing, damaged or foreign file."""
        try:
            return cls(_State.from_file(path))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: Path) -> str:
        """Write the index to one safetensors file, byte for byte equal for equal content; returns `digest`."""
        arrays, texts = self._state.content()
        record = json.dumps({**texts, "sha256": self.digest})  # one text: safetensors shuffles several
        write_atomically(path, [to_safetensors(arrays, {"decontamination": record})])
        return self.digest

    def check(self, text: str) -> list[Hit]:
        """All hits in one document, in order of their place."""
        return self.check_batch([text])[0]

    def check_batch(self, texts: Sequence[str]) -> list[list[Hit]]:
        """The hits of every document. Short documents are several times faster together than one by one."""
        normalised = normalise(texts)
        hits: list[list[Hit]] = [[] for _ in texts]
        found = self._index.find(normalised)
        if found:
            for document, hit in self._gram_hits(texts, normalised, found):
                hits[document].append(hit)
        for document, text in enumerate(texts):
            hits[document] += self._signature_hits(text)
            hits[document].sort(key=lambda hit: (hit.offset, hit.benchmark, hit.item, hit.kind))
        return hits

    def _gram_hits(
        self, texts: Sequence[str], normalised: Texts, found: list[tuple[int, int]]
    ) -> Iterable[tuple[int, Hit]]:
        """Join neighbouring 13-grams of one piece in one document and place them in the original text."""
        raw_offset_N = normalised.raw_offsets()
        matched: dict[tuple[int, int], list[int]] = defaultdict(list)
        for word, piece in found:
            document = normalised.text_at(normalised.starts_W[word])
            if document == normalised.text_at(normalised.starts_W[word + WORDS - 1]):
                matched[document, piece].append(word)
        for (document, piece), words in matched.items():
            kind = self._state.piece_kinds[piece]
            enough = min(SOLUTION_WORDS, int(self._piece_words[piece])) if kind == "solution" else WORDS
            encoded = texts[document].encode("utf-8", "surrogatepass")
            for _, run in groupby(enumerate(words), key=lambda pair: pair[1] - pair[0]):
                run_words = [word for _, word in run]
                last = run_words[-1] + WORDS - 1
                if last - run_words[0] + 1 < enough:
                    continue
                origin = normalised.raw_begins_T[document]
                begin = int(raw_offset_N[normalised.starts_W[run_words[0]]] - origin)
                end = int(raw_offset_N[normalised.ends_W[last]] - origin)
                offset = len(encoded[:begin].decode("utf-8", "surrogatepass"))
                excerpt = encoded[begin:end].decode("utf-8", "surrogatepass")
                yield document, self._hit(self._state.piece_owners[piece], kind, excerpt, offset)

    def _signature_hits(self, text: str) -> Iterable[Hit]:
        if "def" not in text:
            return
        for match in _DEFINITION.finditer(text):
            for number, wanted in self._by_name.get(match[1], ()):
                given = find_signature(text, match[1], match.start())
                if given is None or len(given.parameters) != len(wanted.parameters):
                    continue
                if (_same(given, wanted) and _is_telling(wanted)) or self._is_near(
                    text, match.start(), number
                ):
                    excerpt = text[match.start() : match.end() + 1 + sum(map(len, given.parameters))]
                    yield self._hit(number, "signature", excerpt, match.start())

    def _is_near(self, text: str, offset: int, number: int) -> bool:
        """Whether the text around a definition, its head excepted, shares a 6-gram with the item's prompt."""
        before, after = NEAR_CHARACTERS
        head_end = text.find(":", text.find(")", offset))
        around = [text[max(0, offset - before) : offset], text[head_end : head_end + after]]
        return any(
            self._state.near_owners[piece] == number for _, piece in self._near.find(normalise(around))
        )

    def _hit(self, number: int, kind: Kind, excerpt: str, offset: int) -> Hit:
        benchmark, item, _ = self._items[number]
        return Hit(benchmark, item, kind, excerpt[:_EXCERPT], offset)

    def coverage(self) -> dict[str, Coverage]:
        """Per benchmark: how many of its items the index can find."""
        reached: dict[str, set[int]] = {"prompt": set(), "solution": set(), "passage": set()}
        for piece in self._index.texts_with_grams():
            reached[self._state.piece_kinds[piece]].add(self._state.piece_owners[piece])
        members: dict[str, set[int]] = defaultdict(set)
        for number, (benchmark, _, _) in enumerate(self._items):
            members[benchmark].add(number)
        signed = {number for number, (_, _, signature) in enumerate(self._items) if signature}
        return {
            benchmark: Coverage(
                items=len(numbers),
                by_prompt=len(numbers & reached["prompt"]),
                by_solution=len(numbers & reached["solution"]),
                by_signature=len(numbers & signed),
                out_of_reach=len(numbers - reached["prompt"] - reached["solution"] - signed),
            )
            for benchmark, numbers in members.items()
        }


def _same(given: Signature, wanted: Signature) -> bool:
    """Whether parameters have the same names, or all of them the same annotations."""
    if given.parameters == wanted.parameters:
        return True
    folded = [annotation.lower() for annotation in given.annotations]
    return all(folded) and folded == [annotation.lower() for annotation in wanted.annotations]


def _is_telling(signature: Signature) -> bool:
    """Whether a name and its parameters say enough to belong to one task."""
    words = re.findall(r"[A-Z]?[a-z]{2,}|[A-Z]{3,}", " ".join([signature.name, *signature.parameters]))
    return len({word.lower() for word in words if len(word) >= 3}) >= TELLING_WORDS


def _without_head(text: str, name: str) -> list[str]:
    """`text` before and after the head of its function `name`: what is said of it, not what it is called."""
    head = find_head(text, name)
    return [text] if head is None else [text[: head.start()], text[head.end() :]]
