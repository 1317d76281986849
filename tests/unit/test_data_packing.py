from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.packing import PackFile, best_fit, pack_split
from data_mixtures.sequences import source_items
from data_mixtures.shards import ShardError
from tests.unit.data_fixtures import random_documents, write_source


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), capacity=st.integers(1, 50))
def test_best_fit_places_every_piece_once_and_never_overfills(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    order, sizes = best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    bins = np.split(order, np.cumsum(sizes)[:-1]) if len(sizes) else []
    filled = [sum(lengths[piece] for piece in bin_) for bin_ in bins]
    assert all(0 < total <= capacity for total in filled)
    assert sum(total * 2 <= capacity for total in filled) <= 1  # two half-empty ones would have been one


def test_best_fit_takes_the_tightest_place() -> None:
    """4 fits beside 5 and beside 6; beside 6 it leaves nothing."""
    order, sizes = best_fit(np.array([5, 6, 4]), 10)
    assert [bin_.tolist() for bin_ in np.split(order, np.cumsum(sizes)[:-1])] == [[1, 2], [0]]


def test_packs_cover_the_documents_and_report_padding_and_cuts(tmp_path: Path) -> None:
    documents = [[1, *range(3, 3 + n), 2] for n in (2, 30, 4, 1, 8, 3)]  # lengths 4, 32, 6, 3, 10, 5
    directory = write_source(tmp_path, "a", documents, per_shard=4)
    packed = pack_split(directory, 10)
    assert packed["cut"] == pytest.approx(1 / 6)
    assert packed["padded"] == pytest.approx(1 - 60 / (10 * packed["items"]))
    assert packed["pieces"] == 9  # the long one in four
    packs = PackFile(directory, 10, packed["items"])
    covered = sorted(piece for item in range(packed["items"]) for piece in packs.pieces(item))
    assert covered == [(0, 4), (4, 10), (14, 10), (24, 10), (34, 2), (36, 6), (42, 3), (45, 10), (55, 5)]
    assert pack_split(directory, 10) == packed


def test_a_packing_belongs_to_its_shards_and_length(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "a", random_documents(10, 0))
    with pytest.raises(
        ShardError, match=r"not packed for sequences of 32 tokens; run .* pack root=.* source=a seq_len=32"
    ):
        source_items(directory, 32, "best_fit")
    packed = pack_split(directory, 32)
    assert source_items(directory, 32, "best_fit")[:2] == (packed["items"], packed["sha256"])
    other = write_source(tmp_path, "b", random_documents(10, 1))
    for ending in ("bin", "json"):
        (other / f"packing-32.{ending}").write_bytes((directory / f"packing-32.{ending}").read_bytes())
    with pytest.raises(ShardError, match=r"packing-32\.json belongs to an earlier preparation"):
        source_items(other, 32, "best_fit")
    (directory / "packing-32.bin").write_bytes(b"")
    with pytest.raises(ShardError, match=r"packing-32\.bin has 0 bytes"):
        PackFile(directory, 32, packed["items"])


def test_a_split_without_documents_packs_to_nothing(tmp_path: Path) -> None:
    packed = pack_split(write_source(tmp_path, "a", []), 4)
    assert (packed["items"], packed["pieces"], packed["padded"], packed["cut"]) == (0, 0, 0, 0)
    assert source_items(tmp_path / "a" / "train", 4, "best_fit")[0] == 0
