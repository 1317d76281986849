"""Word n-grams of text with numpy: normalise, hash, and look up in a fixed set of reference texts.

Normalisation: words are runs of letters and digits; everything else (blanks, line breaks, punctuation, `_`,
and the non-ASCII punctuation and symbols of U+00A0-00BF, U+2000-2BFF and U+3000-303F) separates them. ASCII
letters are lower-cased, other letters compare as they are written. So layout, quoting and markup do not matter.

How it is fast: one text or many joined are normalised together, all n-grams get a 64-bit polynomial hash from
one running sum, a bit table answers "surely not" for nearly all of them, and what is left is compared byte by
byte with the reference text, so a hash collision is never a match.

Shape suffixes: N bytes, W words, G n-grams, T texts, E entries of the index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LETTER_WORDS = 3  # an n-gram with fewer words of two characters and a letter is a row and is ignored

_BLANK = 32
_WINDOW = 1 << 16  # bytes hashed at a time: the running sums stay in the cache
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Texts:
    """Several texts, normalised one after another: words, each followed by one blank.

    bytes_N: uint8. starts_W, ends_W: int64, word w is bytes_N[starts_W[w] : ends_W[w]].
    begins_T: int64, where in bytes_N each text starts. raw_begins_T: where in the raw bytes its UTF-8 starts.
    """

    bytes_N: np.ndarray
    starts_W: np.ndarray
    ends_W: np.ndarray
    begins_T: np.ndarray
    raw_begins_T: np.ndarray
    _kept: np.ndarray

    def text_of_gram(self, words: int) -> tuple[np.ndarray, np.ndarray]:
        """For every run of `words` words: the text it starts in (int64), and whether it also ends there."""
        count = max(0, len(self.starts_W) - words + 1)
        first = np.searchsorted(self.begins_T, self.starts_W[:count], side="right") - 1
        last = np.searchsorted(self.begins_T, self.starts_W[words - 1 :], side="right") - 1
        return first, first == last

    def text_at(self, place: int) -> int:
        """The text that byte `place` of bytes_N belongs to."""
        return int(np.searchsorted(self.begins_T, place, side="right")) - 1

    def raw_offsets(self) -> np.ndarray:
        """Offset of every byte of bytes_N among the raw bytes (int64). Costs a pass over the raw bytes."""
        return np.flatnonzero(self._kept)


def _folding_table() -> np.ndarray:
    table = np.full(256, _BLANK, np.uint8)
    for byte in (*range(ord("0"), ord("9") + 1), *range(ord("a"), ord("z") + 1), *range(0x80, 0x100)):
        table[byte] = byte
    for byte in range(ord("A"), ord("Z") + 1):
        table[byte] = byte + 32
    return table


_FOLD = _folding_table()
_IS_LETTER = np.arange(256) >= ord("a")


def normalise(texts: Sequence[str]) -> Texts:
    """Normalise texts as the module docstring says; lone surrogates count as letters."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    joined = b" ".join([*encoded, b""])  # a blank after every text ends its last word
    raw_begins_T = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(data) + 1 for data in encoded], out=raw_begins_T[1:])
    raw = np.frombuffer(joined, np.uint8)
    folded = _FOLD[raw]
    if not joined.isascii():
        _blank_out_symbols(raw, folded)
    is_word = folded != _BLANK
    kept = is_word.copy()
    kept[1:] |= is_word[:-1]  # and the first blank after a word
    bytes_N = folded[kept]
    ends_W = np.flatnonzero(bytes_N == _BLANK)
    starts_W = np.zeros_like(ends_W)
    starts_W[1:] = ends_W[:-1] + 1
    kept_before = np.concatenate([[0], np.cumsum(kept)])
    begins_T = kept_before[raw_begins_T[:-1]]
    return Texts(bytes_N, starts_W, ends_W, begins_T, raw_begins_T[:-1], kept)


def _blank_out_symbols(raw: np.ndarray, folded: np.ndarray) -> None:
    """Overwrite the non-ASCII punctuation of `raw` (UTF-8) with blanks in `folded`."""
    for lead, low, high, length in ((0xC2, 0xA0, 0xBF, 2), (0xE2, 0x80, 0xAF, 3), (0xE3, 0x80, 0x80, 3)):
        at = np.flatnonzero(raw[:-1] == lead)
        at = at[(raw[at + 1] >= low) & (raw[at + 1] <= high)]
        for byte in range(length):
            folded[at + byte] = _BLANK


def _powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


_POWER = _powers(_BASE, 2 * _WINDOW)
_INVERSE_POWER = _powers(pow(_BASE, -1, 1 << 64), 2 * _WINDOW)


def gram_hashes(text: Texts, words: int) -> np.ndarray:
    """64-bit hashes of all runs of `words` words, one per word that starts such a run (uint64).

    Σ byte·base^k over the run with its last blank, mod 2⁶⁴, then mixed. All runs longer than 65,535 bytes get
    the same hash: what is looked up is shorter.
    """
    count = max(0, len(text.starts_W) - words + 1)
    begins, ends = text.starts_W[:count], text.ends_W[words - 1 :] + 1
    hashes = np.zeros(count, np.uint64)
    first = 0
    while first < count:
        offset = begins[first]
        near = int(np.searchsorted(begins, offset + _WINDOW))
        last = first + int(np.searchsorted(ends[first:near], offset + 2 * _WINDOW, side="left"))
        if last == first:  # one run that alone is too long
            first += 1
            continue
        window = text.bytes_N[offset : ends[last - 1]]
        sums = np.zeros(len(window) + 1, np.uint64)
        np.cumsum(window * _POWER[: len(window)], out=sums[1:])
        begin = begins[first:last] - offset
        hashes[first:last] = (sums[ends[first:last] - offset] - sums[begin]) * _INVERSE_POWER[begin]
        first = last
    hashes ^= hashes >> np.uint64(32)  # the low bits of such a sum are weak
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> np.uint64(32)
    return hashes


def usable_grams(text: Texts, words: int) -> np.ndarray:
    """For every run of `words` words: whether it lies in one text and is no row of numbers or letters (bool)."""
    letters = np.concatenate([[0], np.cumsum(_IS_LETTER[text.bytes_N])])
    counts = (letters[text.ends_W] > letters[text.starts_W]) & (text.ends_W - text.starts_W >= 2)
    total = np.concatenate([[0], np.cumsum(counts)])
    return (total[words:] - total[:-words] >= LETTER_WORDS) & text.text_of_gram(words)[1]


class GramIndex:
    """The n-grams of reference texts: hash → where they are in the normalised text.

    hash_E (uint64, sorted) and place_E (uint32, byte offset in `blob`): one entry per n-gram and text that
    holds it. begins_T: where each text starts in `blob`.
    """

    ARRAYS = ("blob", "begins_T", "hash_E", "place_E")

    def __init__(
        self, words: int, blob: np.ndarray, begins_T: np.ndarray, hash_E: np.ndarray, place_E: np.ndarray
    ) -> None:
        self.words = words
        self.blob = blob
        self.begins_T = begins_T
        self.hash_E = hash_E
        self.place_E = place_E
        self._blob = blob.tobytes()
        self._begins = begins_T.tolist()
        self._table_bits = 5 + max(11, len(hash_E).bit_length())  # at most 1 in 16 foreign n-grams passes
        self._bits = np.zeros(1 << (self._table_bits - 3), np.uint8)
        byte, bit = self._slot(hash_E)
        np.bitwise_or.at(self._bits, byte, bit)

    @classmethod
    def build(cls, texts: Sequence[str], owners: Sequence[int], words: int, most_owners: int) -> GramIndex:
        """Index the usable n-grams of `texts`, except those that more than `most_owners` owners have."""
        text = normalise(texts)
        if len(text.bytes_N) >= 1 << 32:
            raise ValueError(f"the reference texts have {len(text.bytes_N)} bytes; the limit is 4 GiB")
        keep = np.flatnonzero(usable_grams(text, words))
        hashes, where = gram_hashes(text, words)[keep], text.text_of_gram(words)[0][keep]
        # One entry per (hash, text): the first place. np.lexsort is stable, so places stay in order.
        order = np.lexsort((where, hashes))
        hashes, where, place = hashes[order], where[order], text.starts_W[keep][order]
        first = np.ones(len(hashes), bool)
        first[1:] = (hashes[1:] != hashes[:-1]) | (where[1:] != where[:-1])
        hashes, where, place = hashes[first], where[first], place[first]
        owner = np.asarray(owners, np.int64)[where]
        new_owner = np.ones(len(hashes), bool)
        new_owner[1:] = (hashes[1:] != hashes[:-1]) | (owner[1:] != owner[:-1])
        group = np.cumsum(np.concatenate([[False], hashes[1:] != hashes[:-1]])) if len(hashes) else owner
        rare = np.bincount(group, weights=new_owner)[group] <= most_owners if len(hashes) else new_owner
        return cls(words, text.bytes_N, text.begins_T, hashes[rare], place[rare].astype(np.uint32))

    def arrays(self) -> dict[str, np.ndarray]:
        """What the constructor takes besides `words`, by name."""
        return {name: getattr(self, name) for name in self.ARRAYS}

    def find(self, text: Texts) -> list[tuple[int, int]]:
        """All (w, t) where the n-gram that starts at word w of `text` is also one of reference text t."""
        hashes = gram_hashes(text, self.words)
        byte, bit = self._slot(hashes)
        maybe = np.flatnonzero(self._bits[byte] & bit)
        low_M = np.searchsorted(self.hash_E, hashes[maybe], side="left")
        high_M = np.searchsorted(self.hash_E, hashes[maybe], side="right")
        found = []
        for m in np.flatnonzero(low_M < high_M).tolist():
            word = int(maybe[m])
            gram = text.bytes_N[text.starts_W[word] : text.ends_W[word + self.words - 1] + 1].tobytes()
            for place in self.place_E[low_M[m] : high_M[m]].tolist():
                if self._blob.startswith(gram, place):
                    found.append((word, bisect_right(self._begins, place) - 1))
        return found

    def _slot(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The byte of the bit table that a hash uses, and the bit in it (uint8)."""
        top = hashes >> np.uint64(64 - self._table_bits)
        return top >> np.uint64(3), np.left_shift(np.uint8(1), (top & np.uint64(7)).astype(np.uint8))

    def words_of_texts(self) -> np.ndarray:
        """How many words each reference text has (int64)."""
        words_before = np.searchsorted(np.flatnonzero(self.blob == _BLANK), [*self._begins, len(self.blob)])
        return np.diff(words_before)

    def texts_with_grams(self) -> list[int]:
        """The reference texts that at least one entry points to, in order."""
        return np.unique(np.searchsorted(self.begins_T, self.place_E, side="right") - 1).tolist()
