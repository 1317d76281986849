"""A seeded pseudo-random permutation of [0, n) that is computed, not stored.

Shuffling a source of 10⁹ items by an array would need gigabytes on every rank. Here the place of an item
comes from
a Feistel network: it permutes [0, 2^bits) for the smallest 2^bits ≥ n, and values that fall outside [0, n)
are sent through again ("cycle walking"), which leaves a permutation of [0, n). Fewer than two passes are
expected.

The order is part of what a trained model depends on, so it is fixed here ("feistel-1"), in integer arithmetic
that is the same everywhere, rather than taken from a library that may change it.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8


def permutation_key(seed: int, source: str, epoch: int) -> int:
    """The 64-bit key of one epoch of one source."""
    digest = hashlib.sha256(f"feistel-1\0{seed}\0{source}\0{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def permute(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Where each index goes: element i is permuted within [0, size[i]) under key[i].

    All three are 1-D of one length; index and size int64 with 0 ≤ index < size ≤ 2^48, key uint64. Returns
    int64.
    """
    value = index.astype(np.uint64)
    limit = size.astype(np.uint64)
    key = key.astype(np.uint64)
    # the bit length of size - 1, split into a lower and an upper half that both have at least one
    bits = np.maximum(2, np.frexp((size - 1).astype(np.float64))[1]).astype(np.uint64)
    low_bits = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    todo = np.arange(len(value))
    while len(todo):
        value[todo] = _feistel(value[todo], key[todo], low_bits[todo], low_mask[todo], high_mask[todo])
        todo = todo[value[todo] >= limit[todo]]
    return value.astype(np.int64)


def _feistel(
    value: np.ndarray, key: np.ndarray, low_bits: np.ndarray, low_mask: np.ndarray, high_mask: np.ndarray
):
    """Permute [0, 2^bits): in turn, each half is changed by a hash of the other, which can be undone."""
    low, high = value & low_mask, value >> low_bits
    for i in range(ROUNDS):
        if i % 2 == 0:
            high = high ^ (_hash(low, key, i) & high_mask)
        else:
            low = low ^ (_hash(high, key, i) & low_mask)
    return (high << low_bits) | low


def _hash(value: np.ndarray, key: np.ndarray, round_index: int) -> np.ndarray:
    """64 well-mixed bits of (value, key, round): SplitMix64's finaliser, twice, each after the key."""
    x = value + np.uint64((round_index + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    for _ in range(2):
        x = x ^ key
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x
