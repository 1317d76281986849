"""What a recipe asks of its sources, before any data is there: tokens, epochs over all phases, disk, the shift.

A source's size is its measured token count where it is prepared under the recipe's root, else what the catalogue
expects; every row says which. The plan refuses what would train on the wrong thing: a source that nobody
describes, one without a size, one read more often than the recipe's cap over all phases, one read twice under
two names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_mixtures.recipe import DataConfig, Phase, load_phases, load_recipe
from data_mixtures.shards import read_manifest
from data_mixtures.sources import CATALOGUE_FOLDER, Source, catalogue, unknown_source
from data_mixtures.strict_yaml import read_mapping

EXPERIMENT_FOLDER = CATALOGUE_FOLDER.parents[1] / "experiment"
RAMP_POINTS = 11  # at which the plan states the weights of a ramp
BYTES_PER_TOKEN = 2  # of a source not prepared yet: uint16, for vocabularies up to 65,536


@dataclass(frozen=True)
class SourceRow:
    """One source over all phases.

    weights, tokens: per phase (0 where it is not in the recipe), the mean over the phase when there is a ramp.
    epochs: within each phase. cumulative_epochs: over all of them. needed_tokens: how much of it is ever read.
    disk_bytes: of the needed tokens.
    """

    name: str
    category: str
    weights: tuple[float, ...]
    tokens: tuple[float, ...]
    epochs: tuple[float, ...]
    cumulative_epochs: float
    size_tokens: int
    size_is: Literal["measured", "expected"]
    needed_tokens: float
    disk_bytes: float


@dataclass(frozen=True)
class RampRow:
    """The share of every category at one point of a ramp."""

    tokens: int
    categories: dict[str, float]


@dataclass(frozen=True)
class Plan:
    """All phases up to and with the last one, which is the one planned."""

    name: str
    phases: tuple[str, ...]
    phase_tokens: tuple[int, ...]
    max_epochs: float
    rows: tuple[SourceRow, ...]
    categories: dict[str, tuple[float, ...]]
    ramp_from: str | None
    ramp: tuple[RampRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class _Size:
    tokens: int
    measured: bool
    bytes_per_token: int
    category: str


def make_plan(config: DataConfig, seq_len: int = 4096, folder: Path = CATALOGUE_FOLDER) -> Plan:
    """The plan of a recipe and of those it comes after.

    Raises ValueError with all problems at once: unknown or duplicate sources, sources of unknown size, sources
    over the epoch cap (those of the planned phase and, for what is left of them, the earlier ones).
    """
    phases = load_phases(config, seq_len)
    known = catalogue(folder)
    means = [_mean_weights(phase, phases) for phase in phases]
    names = list(dict.fromkeys(name for weights in reversed(means) for name in weights))
    problems: list[str] = []
    rows = []
    for name in names:
        size = _size(name, config.root, known, folder, problems)
        if size is not None:
            rows.append(_row(name, size, phases, means))
    problems += _read_twice(names, known)
    problems += [
        _over_cap(row, config.max_epochs, phases) for row in rows if _is_over(row, config.max_epochs)
    ]
    if problems:
        raise ValueError(f"recipe {config.name}:\n  " + "\n  ".join(problems))
    order = _category_order(rows)
    rows.sort(key=lambda row: order.index(row.category))  # stable: in a category, as the recipes list them
    return Plan(
        name=config.name,
        phases=tuple(phase.name for phase in phases),
        phase_tokens=tuple(phase.tokens for phase in phases),
        max_epochs=config.max_epochs,
        rows=tuple(rows),
        categories={category: _category_shares(rows, category, len(phases)) for category in order},
        ramp_from=phases[-1].ramp.start if phases[-1].ramp else None,
        ramp=_ramp(phases, {row.name: row.category for row in rows}),
    )


def recipe_of_experiment(name: str, folder: Path = EXPERIMENT_FOLDER) -> str:
    """The data recipe that configs/experiment/<name>.yaml selects, itself or by an experiment it builds on.

    Raises ValueError for an unknown experiment or one that selects no recipe.
    """
    path = folder / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise ValueError(f"there is no experiment {name!r} in {folder}; there are: {known}")
    defaults = read_mapping(path).get("defaults", [])
    parents = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    for entry in reversed(defaults):
        if isinstance(entry, dict) and (recipe := entry.get("override /data", entry.get("/data"))):
            return str(recipe)
    for parent in reversed(parents):
        return recipe_of_experiment(parent, folder)
    raise ValueError(f"{path}: selects no data recipe; add `- override /data: <recipe>` to its defaults")


def _mean_weights(phase: Phase, phases: list[Phase]) -> dict[str, Fraction]:
    """The share of each source in all of a phase's tokens."""
    if phase.ramp is None:
        return dict(phase.weights)
    start = _ramp_start(phase, phases)
    ramped = Fraction(phase.ramp.tokens, phase.tokens)
    names = dict.fromkeys([*phase.weights, *start])
    return {
        name: phase.weights.get(name, Fraction(0)) * (1 - ramped / 2)
        + start.get(name, Fraction(0)) * ramped / 2
        for name in names
    }


def _ramp_start(phase: Phase, phases: list[Phase]) -> Mapping[str, Fraction]:
    return next(other.weights for other in phases if phase.ramp and other.name == phase.ramp.start)


def _size(
    name: str, root: str, known: Mapping[str, Source], folder: Path, problems: list[str]
) -> _Size | None:
    """A source's size, measured where it is prepared; None, and a problem noted, when nothing tells it."""
    train = Path(root) / name / "train"
    if (train / "manifest.json").exists():
        manifest = read_manifest(train)
        category = (
            known[name].category if name in known else manifest["origin"].get("category", "uncatalogued")
        )
        return _Size(manifest["tokens"], True, np.dtype(manifest["dtype"]).itemsize, category)
    if name not in known:
        problems.append(f"{unknown_source(name, known, folder)}, and {train} is not prepared")
    elif (tokens := known[name].expected_tokens) is None:
        problems.append(
            f"source {name!r} has no size: prepare it, or set expected_tokens in {known[name].file}"
        )
    else:
        return _Size(tokens, False, BYTES_PER_TOKEN, known[name].category)
    return None


def _row(name: str, size: _Size, phases: list[Phase], means: list[dict[str, Fraction]]) -> SourceRow:
    weights = tuple(mean.get(name, Fraction(0)) for mean in means)
    tokens = tuple(weight * phase.tokens for weight, phase in zip(weights, phases, strict=True))
    total = sum(tokens, Fraction(0))
    needed = min(total, Fraction(size.tokens))
    return SourceRow(
        name=name,
        category=size.category,
        weights=tuple(map(float, weights)),
        tokens=tuple(map(float, tokens)),
        epochs=tuple(float(count / size.tokens) if size.tokens else float("inf") for count in tokens),
        cumulative_epochs=float(total / size.tokens) if size.tokens else float("inf"),
        size_tokens=size.tokens,
        size_is="measured" if size.measured else "expected",
        needed_tokens=float(needed),
        disk_bytes=float(needed * size.bytes_per_token),
    )


def _read_twice(names: list[str], known: Mapping[str, Source]) -> list[str]:
    """Sources that are the same data under different names, which would hide how often it is read."""
    by_data: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in names:
        if name in known:
            source = known[name]
            for config in source.configs or ("",):
                by_data[source.path, config, source.split].append(name)
    return [
        f"{' and '.join(same)} are the same data ({' '.join(filter(None, data))}); keep one of them"
        for data, same in by_data.items()
        if len(same) > 1
    ]


def _is_over(row: SourceRow, cap: float) -> bool:
    return row.cumulative_epochs > cap * (1 + 1e-9)


def _over_cap(row: SourceRow, cap: float, phases: list[Phase]) -> str:
    parts = " + ".join(
        f"{epochs:.2f} in {phase.name}" for epochs, phase in zip(row.epochs, phases, strict=True) if epochs
    )
    return (
        f"source {row.name!r} would be read {row.cumulative_epochs:.2f} times ({parts}), more than max_epochs "
        f"{cap:g}: it has {row.size_tokens:,} tokens ({row.size_is}); lower its weight, or raise max_epochs"
    )


def _category_order(rows: list[SourceRow]) -> list[str]:
    known = ("general", "code", "math_reasoning", "chat", "identity", "uncatalogued")
    return [category for category in known if any(row.category == category for row in rows)]


def _category_shares(rows: list[SourceRow], category: str, phases: int) -> tuple[float, ...]:
    chosen = [row.weights for row in rows if row.category == category]
    return tuple(sum(weights[phase] for weights in chosen) for phase in range(phases))


def _ramp(phases: list[Phase], categories: Mapping[str, str]) -> tuple[RampRow, ...]:
    """The categories' shares at even steps of the last phase's ramp; empty without one."""
    phase = phases[-1]
    if phase.ramp is None:
        return ()
    start = _ramp_start(phase, phases)
    rows = []
    for point in range(RAMP_POINTS):
        done = Fraction(point, RAMP_POINTS - 1)
        shares: dict[str, Fraction] = defaultdict(Fraction)
        for name in dict.fromkeys([*start, *phase.weights]):
            begin, end = start.get(name, Fraction(0)), phase.weights.get(name, Fraction(0))
            shares[categories[name]] += begin + (end - begin) * done
        shares_float = {category: float(share) for category, share in shares.items()}
        rows.append(RampRow(int(phase.ramp.tokens * done), shares_float))
    return tuple(rows)


def plan_for(experiment: str, recipe: str, root: str = "", seq_len: int = 4096) -> Plan:
    """The plan of an experiment's or a named recipe; `root`, where given, in place of the recipe's own."""
    if bool(experiment) == bool(recipe):
        raise ValueError("give either experiment=<name> or recipe=<name>")
    config = load_recipe(recipe or recipe_of_experiment(experiment))
    if root:
        config = DataConfig(**{**config.__dict__, "root": root})
    return make_plan(config, seq_len)
