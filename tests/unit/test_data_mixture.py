from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.mixture import Mixture, SourceSize, build_mixture
from data_mixtures.permutation import permutation_key, permute
from data_mixtures.plan_record import (
    PlanChanged,
    describe,
    differences,
    plan_hash,
    record_plan,
    recorded_mixture,
)
from data_mixtures.recipe import DataConfig, Phase, Ramp, load_phases, load_recipe
from data_mixtures.schedule import MAX_DECIMALS, Schedule, exact_weights, fair_order
from tests.unit.data_fixtures import random_documents, write_source

S = 10
PINNED_ORDER = [9, 8, 5, 4, 6, 7, 3, 0, 1, 2]
PINNED_SOURCES = [0, 1, 0, 1, 0, 2, 0, 3, 1, 0]


@st.composite
def weights(draw: st.DrawFn, largest: int = 12) -> list[Fraction]:
    """Weights with a common denominator, some of them tiny."""
    parts = draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 2000)), min_size=1, max_size=largest))
    return [Fraction(part, sum(parts)) for part in parts]


def prefix_counts(sources: np.ndarray, k: int) -> np.ndarray:
    """(n+1, K): how often each source stands in each prefix."""
    counts = np.zeros((len(sources) + 1, k), dtype=np.int64)
    counts[np.arange(1, len(sources) + 1), sources] = 1
    return counts.cumsum(axis=0)


# --- which source


@settings(max_examples=60, deadline=None, derandomize=True)
@given(w=weights(), start=st.integers(0, 10**9))
def test_each_source_is_within_one_sequence_of_its_share_at_every_prefix(
    w: list[Fraction], start: int
) -> None:
    schedule = Schedule(w)
    sources, ordinals = schedule.locate(np.arange(3000))
    counts = prefix_counts(sources, len(w))
    for s, share in enumerate(w):
        n = np.arange(3001)
        # |count - n·share| < 1, without rounding
        assert (np.abs(counts[:, s] * share.denominator - n * share.numerator) < share.denominator).all()
    assert (ordinals == counts[np.arange(3000), sources]).all()
    # and far away: the counts by formula agree with what lies between
    far, ordinals = schedule.locate(np.arange(start, start + 50))
    before = schedule.counts(start)
    assert (schedule.counts(start + 50) - before == np.bincount(far, minlength=len(w))).all()
    assert (ordinals == before[far] + prefix_counts(far, len(w))[np.arange(50), far]).all()
    assert all(abs(int(c) - start * share) < 1 for c, share in zip(before, w, strict=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), length=st.integers(1, 4000))
def test_a_ramp_follows_the_integral_of_the_line(data: st.DataObject, length: int) -> None:
    end = data.draw(weights(8))
    parts = data.draw(st.lists(st.integers(0, 50), min_size=len(end), max_size=len(end)).filter(any))
    start = [Fraction(part, sum(parts)) for part in parts]
    schedule = Schedule(end, (start, length))
    n = np.arange(length + 500)
    sources, ordinals = schedule.locate(n)
    counts = prefix_counts(sources, len(end))
    assert (ordinals == counts[n, sources]).all()
    for position in data.draw(st.lists(st.integers(0, length + 500), max_size=10)):
        assert (schedule.counts(position) == counts[position]).all()
    inside = np.minimum(np.arange(length + 501), length)
    for s, (u, v) in enumerate(zip(start, end, strict=True)):
        line = float(u) * inside + float(v - u) * inside**2 / (2 * length)
        line = line + float(v) * (np.arange(length + 501) - inside)
        # whole sequences at the steps, whole sequences within a step, and the curve within a step
        assert np.abs(counts[:, s] - line).max() < 2.25
        steps = np.arange(0, length, schedule._step)
        assert np.abs(counts[steps, s] - line[steps]).max() < 1 + 1e-9


def test_a_fair_order_by_hand() -> None:
    source, rank = fair_order((2, 1))
    assert source.tolist() == [0, 1, 0]
    assert rank.tolist() == [0, 0, 1]
    assert fair_order((0, 0))[0].tolist() == []
    assert fair_order((0, 3))[0].tolist() == [1, 1, 1]


# --- which item


@settings(max_examples=80, deadline=None, derandomize=True)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    order = permute(np.arange(size), np.full(size, size), np.full(size, key, dtype=np.uint64))
    assert sorted(order.tolist()) == list(range(size))


def test_permutations_are_shuffled_and_differ() -> None:
    size, epochs = 1000, 200
    keys = [permutation_key(7, "code", epoch) for epoch in range(epochs)]
    orders = np.stack(
        [permute(np.arange(size), np.full(size, size), np.full(size, k, np.uint64)) for k in keys]
    )
    assert len({tuple(order) for order in orders.tolist()}) == epochs
    # the first place is uniform over the items, neighbours are unrelated, and so are epochs
    halves = orders < size // 2
    assert abs(halves.mean(axis=0) - 0.5).max() < 0.2  # 5.6 standard deviations
    assert abs(np.mean([np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders])) < 0.01
    assert abs(np.corrcoef(orders)[np.triu_indices(epochs, 1)]).mean() < 0.04
    assert permutation_key(7, "code", 0) != permutation_key(7, "prose", 0) != permutation_key(8, "prose", 0)


def test_permute_mixes_sizes_and_works_at_six_trillion_tokens() -> None:
    sizes = np.array([1, 2, 3, 10**9, 2**40 + 1, 2**47 + 1])
    order = permute(sizes - 1, sizes, np.arange(6).astype(np.uint64))
    assert ((order >= 0) & (order < sizes)).all()
    alone = [permute(sizes[i : i + 1] - 1, sizes[i : i + 1], np.array([i], np.uint64))[0] for i in range(6)]
    assert order.tolist() == alone


def test_the_order_is_pinned() -> None:
    """Changing the algorithm silently would change the data of every run that resumes."""
    order = permute(np.arange(10), np.full(10, 10), np.full(10, permutation_key(0, "code", 0), np.uint64))
    assert order.tolist() == PINNED_ORDER
    assert fair_order((5, 3, 1, 1))[0].tolist() == PINNED_SOURCES


# --- the mixture


def mixture(
    *phases: Phase, items: dict[str, int], seed: int = 0, max_epochs: float = 1e9, seq_len: int = S
) -> Mixture:
    sizes = {s: SourceSize(items=n, tokens=n * seq_len, sha256=f"sha of {s}") for s, n in items.items()}
    return Mixture(
        phases, sizes, seq_len=seq_len, seed=seed, packing="concat", max_epochs=max_epochs, tokenizer="tok"
    )


def phase(name: str, sequences: int, shares: dict[str, Fraction], ramp: Ramp | None = None) -> Phase:
    return Phase(name=name, tokens=sequences * S, weights=shares, ramp=ramp)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Phase], dict[str, int]]:
    """Two or three phases over some of five sources of 1 to 60 items."""
    names = [f"s{i}" for i in range(5)]
    phases = []
    for i in range(draw(st.integers(2, 3))):
        chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=5, unique=True))
        parts = [draw(st.integers(1, 20)) for _ in chosen]
        shares = {name: Fraction(part, sum(parts)) for name, part in zip(chosen, parts, strict=True)}
        sequences = draw(st.integers(1, 200))
        ramp = None
        if i and draw(st.booleans()):
            ramp = Ramp(start=phases[-1].name, tokens=draw(st.integers(1, sequences)) * S)
        phases.append(phase(f"p{i}", sequences, shares, ramp))
    return phases, {name: draw(st.integers(1, 60)) for name in names}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plan=plans(), seed=st.integers(0, 99))
def test_items_over_all_phases_come_in_whole_epochs(
    plan: tuple[list[Phase], dict[str, int]], seed: int
) -> None:
    phases, items = plan
    drawn: dict[str, list[int]] = {name: [] for name in items}
    for i in range(len(phases)):
        part = mixture(*phases[: i + 1], items=items, seed=seed)
        assert part.consumed_before() == {name: len(drawn[name]) for name in part.sources}
        sources, indices, epochs = part.locate(np.arange(part.sequences))
        for source, item, epoch in zip(sources.tolist(), indices.tolist(), epochs.tolist(), strict=True):
            name = part.sources[source]
            assert epoch == len(drawn[name]) // items[name]
            drawn[name].append(item)
        assert part.consumed(part.sequences) == {s: c for s, c in _count(part, sources).items()}
    for name, sequence in drawn.items():
        size = items[name]
        epochs_of = [sequence[k : k + size] for k in range(0, len(sequence), size)]
        for epoch in epochs_of[:-1]:
            assert sorted(epoch) == list(range(size))  # all of an epoch before the next begins
        for epoch in epochs_of[-1:]:
            assert len(set(epoch)) == len(epoch)  # nothing twice in an epoch


def test_every_epoch_source_and_seed_has_its_own_order() -> None:
    half = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    orders = []
    for seed in (0, 1):
        drawn = mixture(phase("p", 120, half), items={"a": 30, "b": 30}, seed=seed)
        sources, indices, _ = drawn.locate(np.arange(120))
        for s in (0, 1):
            orders += [tuple(epoch) for epoch in indices[sources == s].reshape(2, 30).tolist()]
    assert len(set(orders)) == 8


def _count(part: Mixture, sources: np.ndarray) -> dict[str, int]:
    counted = Counter(sources.tolist())
    return {name: counted[s] for s, name in enumerate(part.sources)}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(plan=plans(), data=st.data())
def test_random_access_equals_the_whole_order(
    plan: tuple[list[Phase], dict[str, int]], data: st.DataObject
) -> None:
    phases, items = plan
    whole = mixture(*phases, items=items)
    sources, indices, epochs = whole.locate(np.arange(whole.sequences))
    n = data.draw(st.integers(0, whole.sequences - 1))
    place = mixture(*phases, items=items).place(n)
    assert (place.phase, place.source) == (phases[-1].name, whole.sources[sources[n]])
    assert (place.item, place.epoch) == (indices[n], epochs[n])


def test_the_epoch_cap_counts_all_phases() -> None:
    half = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    one, two = phase("one", 100, half), phase("two", 100, half)
    assert mixture(one, two, items={"a": 25, "b": 100}, max_epochs=4).epochs() == {"a": 4.0, "b": 1.0}
    message = (
        r"recipe two: source a would be read 4\.17 times over the phases one \+ two, the cap is 4; lower its weight "
        r"or the token budget, prepare more of it, or raise max_epochs; source b would be read 10\.00"
    )
    with pytest.raises(ValueError, match=message):
        mixture(one, two, items={"a": 24, "b": 10}, max_epochs=4)


def test_too_small_sources_and_phases_are_named() -> None:
    only = {"a": Fraction(1)}
    with pytest.raises(ValueError, match="source a holds 0 tokens, not one sequence of 10"):
        mixture(phase("p", 10, only), items={"a": 0})
    with pytest.raises(ValueError, match="its 0 tokens are less than one sequence of 10"):
        mixture(phase("p", 0, only), items={"a": 5})


# --- six trillion tokens


SIX_TRILLION = """
import time
import numpy as np
from fractions import Fraction
from data_mixtures.mixture import Mixture, SourceSize
from data_mixtures.recipe import Phase, Ramp

def peak_megabytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
before = peak_megabytes()
started = time.process_time()
rng = np.random.default_rng(0)
def shares():
    parts = rng.multinomial(10**6 - 35, np.full(35, 1 / 35)) + 1  # the longest possible period
    return {f"s{i}": Fraction(int(part), 10**6) for i, part in enumerate(parts)}
items = enumerate(rng.integers(10**7, 3 * 10**8, 35))
sizes = {f"s{i}": SourceSize(items=int(n), tokens=0, sha256="") for i, n in items}
phases = [
    Phase(name="one", tokens=4 * 10**12, weights=shares()),
    Phase(name="two", tokens=2 * 10**12, weights=shares(), ramp=Ramp(start="one", tokens=10**11)),
]
plan = Mixture(phases, sizes, seq_len=4096, seed=0, packing="concat", max_epochs=4, tokenizer="")
plan.place(plan.sequences - 1)
start_up = time.process_time() - started
positions = rng.integers(0, plan.sequences, 1000).tolist()
started = time.process_time()
for position in positions:
    plan.place(position)
per_access = (time.process_time() - started) / 1000
print(start_up, per_access, peak_megabytes() - before)
"""


def test_the_six_trillion_token_plan_is_quick_and_small() -> None:
    """Two phases of 35 sources, weights with the longest period, a ramp of 100B tokens; in a fresh process."""
    printed = subprocess.run([sys.executable, "-c", SIX_TRILLION], capture_output=True, text=True, check=True)
    start_up, per_access, megabytes = map(float, printed.stdout.split())
    assert start_up < 10
    assert per_access < 1e-3
    assert 5 < megabytes < 200  # the tables alone take five


# --- recipes


RECIPE = {"name": "r", "root": "data", "tokens": 1000, "weights": {"a": 0.7, "b": 0.2, "c": 0.1}}


def test_weights_are_read_as_decimals() -> None:
    assert exact_weights({"a": 0.1, "b": 0.2, "c": 0.7}, "x") == {
        "a": Fraction(1, 10),
        "b": Fraction(1, 5),
        "c": Fraction(7, 10),
    }
    assert exact_weights({"a": 1}, "x") == {"a": Fraction(1)}
    nearly = exact_weights({"a": 0.333333, "b": 0.333333, "c": 0.333333}, "x")
    assert nearly["a"] == Fraction(1, 3)
    assert exact_weights({"a": 1e-06, "b": 0.999999}, "x")["a"] == Fraction(1, 10**6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": {"a": 0.6, "b": 0.3}}, r"weights sum to 0\.9, not to 1"),
        ({"weights": {"a": 0.6, "b": 0.406}}, r"weights sum to 1\.006, not to 1 .*difference is 0\.006"),
        ({"weights": {"a": 1.0, "b": 0.0}}, r"weight of b is 0\.0; it must be above 0"),
        ({"weights": {"a": 1.5, "b": -0.5}}, r"weight of b is -0\.5; it must be above 0"),
        ({"weights": {"a": float("nan")}}, "weight of a is nan"),
        ({"weights": {"a": 0.1234567, "b": 0.8765433}}, f"at most {MAX_DECIMALS} decimals are kept"),
        ({"weights": {}}, "there are no weights"),
        ({"weights": {"a": "1"}}, "it must map each source to a number"),
        ({"weights": {str(i): 0.003906 for i in range(256)}}, "there are 256 sources, at most 255"),
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"tokens": 1.5}, r"tokens is 1\.5; it must be of type int"),
        ({"max_epochs": 0}, "max_epochs is 0; it must be above 0"),
        ({"max_epochs": "4"}, "max_epochs is '4'; it must be a number"),
        ({"packing": "random"}, "packing is 'random'; it must be one of concat, best_fit"),
        ({"after": "phase1"}, "after is 'phase1'; it must be a list"),
        ({"after": ["r"]}, "each recipe comes once, and not r itself"),
        ({"after": ["p", "p"]}, "each recipe comes once"),
        ({"ramp": {"from": "p", "tokens": 10}}, "ramp starts from 'p', but after names no earlier recipe"),
        (
            {"after": ["p"], "ramp": {"from": "p", "tokens": 2000}},
            "ramp takes 2000 tokens; it must be within",
        ),
        ({"after": ["p"], "ramp": {"to": "p"}}, "it must be {from: recipe, tokens: number}"),
        ({"weigths": {}}, "unknown key 'weigths'"),
        ({"seed": True}, "seed is True; it must be of type int"),
    ],
)
def test_wrong_recipes_are_refused_with_one_message(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^recipe r: .*{message}"):
        DataConfig.from_dict({**RECIPE, **change})


def test_all_problems_of_a_recipe_come_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"tokens is -1.*packing is 'x'.*weight of a is 0.*weight of b is -1"
    ):
        DataConfig(name="r", root="d", tokens=-1, weights={"a": 0, "b": -1}, packing="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown key 'x'.*missing key 'root'.*missing key 'tokens'"):
        DataConfig.from_dict({"name": "r", "weights": {"a": 1}, "x": 1})


def test_shipped_recipes_load_and_chain() -> None:
    second = load_recipe("smoke_phase2")
    assert second.after == ("smoke_phase1",)
    assert [p.name for p in load_phases(second, 256)] == ["smoke_phase1", "smoke_phase2"]
    with pytest.raises(ValueError, match=r"no recipe 'nope'.*there are: .*smoke_phase1"):
        load_recipe("nope")


def test_a_chain_must_order_shared_sources_alike(tmp_path: Path) -> None:
    second = load_recipe("smoke_phase2")
    other = DataConfig(
        name="x", root="d", tokens=10**6, weights={"code": 1.0}, after=("smoke_phase1",), seed=second.seed + 1
    )
    with pytest.raises(ValueError, match=r"continues code after smoke_phase1, but the order differs"):
        load_phases(other, 256)
    unshared = DataConfig(
        name="x", root="d", tokens=10, weights={"chat": 1.0}, after=("smoke_phase1",), seed=5
    )
    assert len(load_phases(unshared, 256)) == 2
    lost = DataConfig(
        name="x",
        root="d",
        tokens=100,
        weights={"code": 1.0},
        after=("smoke_phase1",),
        ramp=Ramp(start="smoke_phase2", tokens=50),
    )
    with pytest.raises(
        ValueError, match=r"its ramp starts from 'smoke_phase2', which is not among .*smoke_phase1"
    ):
        load_phases(lost, 256)


def test_a_phase_may_continue_the_plan_a_run_recorded(tmp_path: Path) -> None:
    shares = {"code": Fraction(1)}
    record_plan(mixture(phase("one", 7, shares), items={"code": 50}), tmp_path / "plan.json")
    config = DataConfig(
        name="two", root="d", tokens=100, weights={"code": 1.0}, after=(str(tmp_path / "plan.json"),)
    )
    phases = load_phases(config, S)
    assert mixture(*phases, items={"code": 50}).consumed_before() == {"code": 7}
    with pytest.raises(ValueError, match="the order differs"):
        load_phases(config, S + 1)
    with pytest.raises(ValueError, match=r"names /nowhere/plan\.json, which cannot be read"):
        load_phases(
            DataConfig(name="t", root="d", tokens=9, weights={"a": 1.0}, after=("/nowhere/plan.json",)), S
        )


# --- from prepared data


def prepared(root: Path) -> DataConfig:
    write_source(root, "a", random_documents(30, 0))
    write_source(root, "b", random_documents(30, 1))
    return DataConfig(name="r", root=str(root), tokens=300, weights={"a": 0.25, "b": 0.75})


def test_a_mixture_is_built_from_manifests(tmp_path: Path) -> None:
    config = prepared(tmp_path)
    built = build_mixture(config, 8)
    assert built.sources == ["a", "b"]
    assert built.sequences == 37
    for source in built.sources:
        manifest = json.loads((tmp_path / source / "train" / "manifest.json").read_text())
        assert built.sizes[source].items == manifest["tokens"] // 8


def test_sources_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    write_source(tmp_path, "a", random_documents(30, 0))
    write_source(tmp_path, "b", random_documents(30, 0), tokenizer_sha256="u" * 64)
    config = DataConfig(name="r", root=str(tmp_path), tokens=300, weights={"a": 0.5, "b": 0.5})
    with pytest.raises(ValueError, match=r"different tokenizers \(a tttttttttttt, b uuuuuuuuuuuu\)"):
        build_mixture(config, 8)


# --- the plan on record


def test_a_recorded_plan_gives_the_same_order(tmp_path: Path) -> None:
    half = {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    original = mixture(
        phase("one", 20, half),
        phase("two", 30, {"b": Fraction(1)}, Ramp(start="one", tokens=15 * S)),
        items={"a": 7, "b": 9},
        seed=3,
    )
    again = recorded_mixture(json.loads(json.dumps(describe(original))))
    n = np.arange(30)
    assert all((x == y).all() for x, y in zip(original.locate(n), again.locate(n), strict=True))
    assert plan_hash(describe(again)) == plan_hash(describe(original))


def test_a_changed_plan_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    shares = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    items = {"a": 50, "b": 50}
    record_plan(mixture(phase("p", 20, shares), items=items), path)
    record_plan(mixture(phase("p", 20, shares), items=items), path)  # the same again is fine
    record_plan(mixture(phase("p", 40, shares), items=items), path)  # and so is a longer run
    changed = {
        r"phases\.0\.weights\.a: 1/2 → 1/4": mixture(
            phase("p", 20, {"a": Fraction(1, 4), "b": Fraction(3, 4)}), items=items
        ),
        r"seed: 0 → 1": mixture(phase("p", 20, shares), seed=1, items=items),
        r"sources\.b\.items: 50 → 51": mixture(phase("p", 20, shares), items={"a": 50, "b": 51}),
        r"seq_len: 10 → 20": mixture(phase("p", 20, shares), seq_len=20, items=items),
        r"sources\.b\.sha256: sha of b → absent": mixture(phase("p", 20, {"a": Fraction(1)}), items=items),
    }
    for message, other in changed.items():
        assert plan_hash(describe(other)) != plan_hash(json.loads(path.read_text()))
        with pytest.raises(PlanChanged, match=message):
            record_plan(other, path)


def test_the_hash_covers_every_difference() -> None:
    shares = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    plans = [
        describe(mixture(phase("p", 20, shares), phase("q", n, shares), items={"a": 5, "b": b}, seed=seed))
        for n, b, seed in itertools.product((20, 30), (5, 6), (0, 1))
    ]
    for one, two in itertools.combinations(plans, 2):
        assert (plan_hash(one) == plan_hash(two)) == (not differences(one, two))
    assert plan_hash(plans[0]) == plan_hash(plans[4])  # only the last budget differs
