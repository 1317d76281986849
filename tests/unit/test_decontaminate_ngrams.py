"""Word n-grams against a slow implementation that works on lists of strings."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.ngrams import GramIndex, gram_hashes, normalise, usable_grams

# Few words, so that long n-grams do repeat; among them all that normalisation has rules for.
WORDS = ["List", "list", "naïve", "Ä", "x1", "42", "7", "日本", "a", "return", "long" * 40]
GAPS = [" ", "\n", "\t ", "_", "...", " — ", "’", "「", "(", "\xa0", " → ", "\r\n    "]


def text_of(words: list[str], gaps: list[str]) -> str:
    return "".join(gap + word for word, gap in zip(words, gaps, strict=True)) + gaps[-1]


texts = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), min_size=1, max_size=60).map(
    lambda pairs: text_of([word for word, _ in pairs], [gap for _, gap in pairs])
)


def slow_words(text: str) -> list[str]:
    """The rule of the module docstring, character by character."""
    words, word = [], ""
    for character in text + " ":
        code = ord(character)
        symbol = 0xA0 <= code <= 0xBF or 0x2000 <= code <= 0x2BFF or 0x3000 <= code <= 0x303F
        if (character.isascii() and character.isalnum()) or (code >= 0x80 and not symbol):
            word += character.lower() if character.isascii() else character
        elif word:
            words.append(word)
            word = ""
    return words


def slow_grams(text: str, size: int) -> list[tuple[str, ...] | None]:
    """The n-grams in order; None for those that are ignored."""
    words = slow_words(text)
    grams: list[tuple[str, ...] | None] = []
    for start in range(len(words) - size + 1):
        gram = tuple(words[start : start + size])
        telling = [w for w in gram if len(w.encode()) >= 2 and any(c >= "a" for c in w)]
        grams.append(gram if len(telling) >= 3 else None)
    return grams


@given(st.text())
def test_words_of_any_text(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    normalised = normalise([text])
    words = [
        normalised.bytes_N[start:end].tobytes().decode()
        for start, end in zip(normalised.starts_W, normalised.ends_W, strict=True)
    ]
    assert words == slow_words(text)


def test_borders_of_the_symbol_ranges() -> None:
    borders = "\x7f\x80\x9f\xa0\xbf\xc0\u1fff\u2000\u203f\u2040\u23ff\u2bff\u2c00\u2fff\u3000\u303f\u3040"
    separating = [c for c in borders if len(normalise([f"a{c}b"]).starts_W) == 2]
    assert separating == [c for c in borders if len(slow_words(f"a{c}b")) == 2]
    assert len(separating) == 10


@settings(max_examples=150, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.lists(texts, min_size=1, max_size=4), st.integers(1, 5))
def test_find_is_exact(reference: list[str], documents: list[str], size: int) -> None:
    """Same words, same text, nothing across the border of two texts, for documents alone and together."""
    index = GramIndex.build(reference, range(len(reference)), size, most_owners=len(reference))
    known = [{gram for gram in slow_grams(text, size) if gram} for text in reference]
    expected: set[tuple[int, int]] = set()
    first_word = 0
    for document in documents:
        grams = slow_grams(document, size)
        own = {(w, t) for w, gram in enumerate(grams) for t in range(len(reference)) if gram in known[t]}
        assert set(index.find(normalise([document]))) == own
        expected |= {(first_word + w, t) for w, t in own}
        first_word += len(slow_words(document))
    together = normalise(documents)
    inside = together.text_of_gram(size)[1]
    assert {(w, t) for w, t in index.find(together) if inside[w]} == expected


def test_hash_depends_on_the_words_alone_wherever_they_stand() -> None:
    """Hashes are the same at the start of a text and far behind it, across the windows of the running sum."""
    noise = random.Random(3)
    filler = " ".join(f"w{noise.randrange(10**6)}" for _ in range(30_000))
    phrase = "one two three four five six seven"
    alone = gram_hashes(normalise([phrase]), 7)
    for before in (0, 1, 10_000, 29_999):
        words = filler.split()
        text = normalise([" ".join([*words[:before], phrase, *words[before:]])])
        assert gram_hashes(text, 7)[before] == alone[0]
    assert len(np.unique(gram_hashes(normalise([filler]), 1))) == len(set(filler.split()))


def test_equal_hashes_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that is the same for everything, only equal words are found."""
    monkeypatch.setattr(
        "data_mixtures.ngrams.gram_hashes",
        lambda text, words: np.zeros(max(0, len(text.starts_W) - words + 1), np.uint64),
    )
    index = GramIndex.build(["alpha beta gamma", "beta gamma delta"], [0, 1], 3, most_owners=2)
    assert index.find(normalise(["alpha beta gamma delta alpha"])) == [(0, 0), (1, 1)]


def test_no_gram_spans_two_reference_texts() -> None:
    index = GramIndex.build(["alpha beta gamma", "delta epsilon zeta"], [0, 1], 3, most_owners=2)
    assert index.find(normalise(["alpha beta gamma delta epsilon zeta"])) == [(0, 0), (3, 1)]


def test_a_word_longer_than_a_window() -> None:
    """A megabyte without a blank neither breaks the hashing nor hides what comes after it."""
    index = GramIndex.build(["alpha beta gamma delta"], [0], 4, most_owners=1)
    text = normalise(["x" * 1_000_000 + " alpha beta gamma delta"])
    assert index.find(text) == [(1, 0)]


@pytest.mark.parametrize("texts", [[], [""], ["", " \n"], ["one two"]])
def test_texts_too_short_for_any_gram(texts: list[str]) -> None:
    normalised = normalise(texts)
    assert len(gram_hashes(normalised, 3)) == 0
    assert len(usable_grams(normalised, 3)) == 0
    index = GramIndex.build(texts, range(len(texts)), 3, most_owners=1)
    assert len(index.hash_E) == 0
    assert index.find(normalise(["one two three"])) == []


def test_shared_grams_are_dropped_by_owner() -> None:
    """Three owners use the same words; a limit of two drops them, but one owner may repeat himself."""
    texts = ["first we take the train", "first we take the car", "first we take the boat"]
    kept = GramIndex.build(texts, [0, 1, 2], 4, most_owners=3)
    assert kept.texts_with_grams() == [0, 1, 2]
    dropped = GramIndex.build(texts, [0, 1, 2], 4, most_owners=2)
    assert dropped.find(normalise(["first we take the"])) == []
    assert len(dropped.find(normalise(["we take the train"]))) == 1
    own = GramIndex.build(texts, [5, 5, 5], 4, most_owners=1)
    assert len(own.find(normalise(["first we take the"]))) == 3
