from __future__ import annotations

import itertools
import os
import threading
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.loader import MixtureLoader, ValidationSet
from data_mixtures.mixture import Mixture, build_mixture
from data_mixtures.packing import pack_split
from data_mixtures.plan_record import PlanChanged, record_plan
from data_mixtures.recipe import DataConfig
from data_mixtures.sequences import IGNORE
from data_mixtures.shards import ShardError
from data_mixtures.token_stream import TokenStream
from tests.unit.data_fixtures import random_documents, write_source

S = 16
Row = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    for i, source in enumerate("abc"):
        write_source(root, source, random_documents(60, seed=i), per_shard=13)
        write_source(root, source, random_documents(20, seed=10 + i), split="validation")
    return root


def config(root: Path, **changes: object) -> DataConfig:
    values = {"tokens": 300 * S, "weights": {"a": 0.6, "b": 0.3, "c": 0.1}, **changes}
    return DataConfig(name="r", root=str(root), **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def mixture(root: Path) -> Mixture:
    return build_mixture(config(root), S)


def loader(
    mixture: Mixture, root: Path, rank: int = 0, world_size: int = 1, batch: int = 1, **more: object
) -> MixtureLoader:
    return MixtureLoader(
        mixture,
        root=root,
        rank=rank,
        world_size=world_size,
        local_batch_size=batch,
        seq_len=S,
        **more,  # type: ignore[arg-type]
    )


def rows(batch: tuple[dict[str, torch.Tensor], torch.Tensor]) -> list[Row]:
    inputs, labels = batch
    lists = (inputs["source"], inputs["input"], inputs["positions"], labels)
    return [
        (source, tuple(tokens), tuple(positions), tuple(label))
        for source, tokens, positions, label in zip(*(t.tolist() for t in lists), strict=True)
    ]


def take(one: MixtureLoader, batches: int) -> list[Row]:
    taken = []
    iterator = iter(one)
    for _ in range(batches):
        taken += rows(next(iterator))
    one.close()
    return taken


@pytest.fixture(scope="module")
def order(mixture: Mixture, root: Path) -> list[Row]:
    """The whole phase, one sequence at a time."""
    return [row for batch in loader(mixture, root) for row in rows(batch)]


def test_the_order_is_the_mixture_read_from_the_shards(
    mixture: Mixture, root: Path, order: list[Row]
) -> None:
    assert len(order) == mixture.sequences == 300
    streams = [TokenStream(root / source / "train") for source in mixture.sources]
    for n, (source, tokens, positions, labels) in enumerate(order):
        place = mixture.place(n)
        assert mixture.sources[source] == place.source
        read, starts, _ = streams[source].read(place.item * S, (place.item + 1) * S)
        assert tokens == tuple(read.tolist())
        assert [i for i, p in enumerate(positions) if p == 0] == sorted({0, *starts.tolist()})
        following = [IGNORE if i in starts else tokens[i] for i in range(1, S)]
        assert list(labels[:-1]) == following


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    legs=st.lists(
        st.tuples(st.integers(1, 16), st.integers(1, 3), st.integers(0, 4), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    )
)
def test_the_global_order_is_the_same_at_any_world_size_batch_size_prefetch_and_restart(
    mixture: Mixture, root: Path, order: list[Row], legs: list[tuple[int, int, int, int]]
) -> None:
    """A run in legs: each stops after some batches; the next resumes its state with other sizes."""
    state = loader(mixture, root).state_dict()
    seen: list[Row] = []
    for world_size, batch, batches, prefetch in legs:
        batches = min(batches, (mixture.sequences - state["position"]) // (world_size * batch))
        ranks = [
            loader(mixture, root, rank, world_size, batch, prefetch=prefetch) for rank in range(world_size)
        ]
        for one in ranks:
            one.load_state_dict(state)
        parts = [take(one, batches) for one in ranks]
        for m in range(batches):
            for part in parts:
                seen += part[m * batch : (m + 1) * batch]
        assert all(one.state_dict() == ranks[0].state_dict() for one in ranks)
        state = ranks[0].state_dict()
    assert state["position"] == len(seen)
    assert seen == order[: len(seen)]


def test_prefetching_does_not_advance_the_state(mixture: Mixture, root: Path) -> None:
    one = loader(mixture, root, batch=2, prefetch=4)
    iterator = iter(one)
    next(iterator)
    while one.ready < 4:
        threading.Event().wait(0.001)
    assert one.state_dict()["position"] == 2
    assert one.wait_seconds > 0
    one.close()
    assert one.ready == 0


def test_the_phase_ends_with_the_last_whole_batch(mixture: Mixture, root: Path) -> None:
    one = loader(mixture, root, rank=1, world_size=2, batch=7)
    assert sum(1 for _ in one) == 300 // 14
    assert one.position == 300 // 14 * 14


def test_threads_end_with_their_iterators(mixture: Mixture, root: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "data-prefetch" for thread in threading.enumerate())

    one = loader(mixture, root, prefetch=1)
    for _ in range(3):
        next(iter(one))
    one.close()
    assert threads() == 0


def test_shapes_and_types(mixture: Mixture, root: Path) -> None:
    inputs, labels = next(iter(loader(mixture, root, batch=3)))
    assert {name: (tuple(t.shape), t.dtype) for name, t in {**inputs, "labels": labels}.items()} == {
        "input": ((3, S), torch.int64),
        "positions": ((3, S), torch.int64),
        "source": ((3,), torch.int64),
        "labels": ((3, S), torch.int64),
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank is 2, world_size is 2; the rank must be below it"),
        ({"batch": 0}, "local_batch_size is 0, prefetch is 2; both must be ≥ 1"),
        ({"prefetch": 0}, "local_batch_size is 1, prefetch is 0; both must be ≥ 1"),
    ],
)
def test_bad_sizes_are_refused(mixture: Mixture, root: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(mixture, root, **sizes)  # type: ignore[arg-type]


def test_another_sequence_length_is_refused(mixture: Mixture, root: Path) -> None:
    with pytest.raises(ValueError, match="seq_len is 8, the mixture was planned for 16"):
        MixtureLoader(mixture, root=root, rank=0, world_size=1, local_batch_size=1, seq_len=8)


def test_a_changed_plan_or_tokenizer_is_refused_by_name(mixture: Mixture, root: Path, tmp_path: Path) -> None:
    state = loader(mixture, root).state_dict()
    record_plan(mixture, tmp_path / "plan.json")
    other = build_mixture(config(root, weights={"a": 0.5, "b": 0.4, "c": 0.1}), S)
    changed = loader(other, root, plan_file=tmp_path / "plan.json")
    with pytest.raises(
        PlanChanged, match=r"phases\.0\.weights\.a: 3/5 → 1/2; phases\.0\.weights\.b: 3/10 → 2/5"
    ):
        changed.load_state_dict(state)
    with pytest.raises(PlanChanged, match=r"its hash differs \(there is no plan\.json"):
        loader(other, root).load_state_dict(state)
    with pytest.raises(PlanChanged, match="the checkpoint was made with tokenizer uuuuuuuuuuuu"):
        loader(mixture, root).load_state_dict({**state, "tokenizer": "u" * 64})


def test_a_longer_run_may_continue(mixture: Mixture, root: Path) -> None:
    one = loader(build_mixture(config(root, tokens=400 * S), S), root)
    one.load_state_dict({**loader(mixture, root).state_dict(), "position": 299})
    assert len(take(one, 5)) == 5


def test_a_cut_off_shard_is_named_with_rank_file_and_offset(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "a", random_documents(60, seed=0))
    mixture = build_mixture(config(tmp_path, weights={"a": 1.0}, tokens=20 * S), S)
    path = directory / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    one = loader(mixture, tmp_path, rank=1, world_size=2)
    with pytest.raises(
        ShardError, match=r"rank 1, sequence 1 of the phase: .*shard-00000\.bin is cut off: it ends at byte"
    ):
        next(iter(one))


def test_a_stalled_read_is_named_with_rank_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(tmp_path, "a", random_documents(60, seed=0))
    mixture = build_mixture(config(tmp_path, weights={"a": 1.0}, tokens=20 * S), S)
    release = threading.Event()
    pread = os.pread

    def stalled(fd: int, size: int, offset: int) -> bytes:
        release.wait()
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", stalled)
    one = loader(mixture, tmp_path, stall_seconds=0.1)
    offset = mixture.place(0).item * S * 2
    try:
        with pytest.raises(
            ShardError, match=rf"no batch for 0\.1 s: rank 0 is reading .*shard-00000\.bin at byte {offset};"
        ):
            next(iter(one))
    finally:
        release.set()


def test_validation_is_the_same_every_time_and_spread_over_the_split(root: Path) -> None:
    held_out = ValidationSet(root, "a", S, max_sequences=5)
    stream = TokenStream(root / "a" / "validation")
    items = stream.tokens // S
    assert len(held_out) == 5
    for i in range(5):
        tokens, positions, labels = held_out[i]
        first = i * items // 5 * S
        assert tokens.tolist() == stream.read(first, first + S)[0].tolist()
        assert positions[0] == 0
        assert labels.shape == (S,)
    assert len(ValidationSet(root, "a", S, max_sequences=10**6)) == items
    with pytest.raises(IndexError):
        held_out[5]
    with pytest.raises(ValueError, match=r"a/validation gives 0 sequences of 100000 tokens"):
        ValidationSet(root, "a", 100_000, max_sequences=5)


def test_packed_sources_are_read_whole(tmp_path: Path) -> None:
    documents = random_documents(40, seed=5, longest=12)
    pack_split(write_source(tmp_path, "a", documents, per_shard=9), S)
    packed = build_mixture(config(tmp_path, weights={"a": 1.0}, tokens=24 * S, packing="best_fit"), S)
    items = packed.sizes["a"].items
    seen = []
    for _, tokens, positions, labels in take(loader(packed, tmp_path), items):
        bounds = [i for i, p in enumerate(positions) if p == 0] + [S]
        for start, stop in itertools.pairwise(bounds):
            piece = list(tokens[start:stop])
            if set(piece) == {0}:  # padding
                assert set(labels[start:stop]) == {IGNORE}
                continue
            seen.append(piece)
            assert list(labels[start:stop]) == [*piece[1:], IGNORE]
    assert sorted(seen) == sorted(documents)


def test_weights_of_the_order_are_exact(mixture: Mixture, order: list[Row]) -> None:
    shares = [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)]
    counts = [0, 0, 0]
    for n, (source, *_) in enumerate(order, start=1):
        counts[source] += 1
        assert all(abs(count - n * share) < 1 for count, share in zip(counts, shares, strict=True))
