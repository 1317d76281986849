"""Recipes: what one phase of training reads. The typed form of configs/data/*.yaml (Hydra group `data`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

from data_mixtures.schedule import exact_weights
from data_mixtures.strict_yaml import read_mapping

RECIPE_FOLDER = Path(__file__).resolve().parents[1] / "configs" / "data"
Packing = Literal["concat", "best_fit"]


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Move the weights in a straight line from those of recipe `start` to this recipe's, over `tokens`
    tokens.
    """

    start: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """One recipe.

    name: of the recipe. root: folder of the prepared sources. tokens: budget of the phase.
    weights: share of each source in the phase's sequences, decimals of at most 6 digits that sum to 1.
    after: all recipes consumed before, in order: names, or paths of an earlier run's plan.json (for a run
        whose budget was not the recipe's). Each source continues where they stopped.
    ramp: change the weights gradually at the start of the phase; in YAML `{from: recipe, tokens: N}`.
    seed: of the order of items. max_epochs: cap on how often a source is read, over all phases.
    packing: concat cuts sequences from the stream of documents; best_fit packs whole documents (and pads).

    Raises ValueError with all problems at once.
    """

    name: str
    root: str
    tokens: int
    weights: dict[str, float]
    after: tuple[str, ...] = ()
    ramp: Ramp | None = None
    seed: int = 0
    max_epochs: float = 4.0
    packing: Packing = "concat"

    def __post_init__(self) -> None:
        problems = []
        if self.tokens < 1:
            problems.append(f"tokens is {self.tokens}; it must be at least 1")
        if self.max_epochs <= 0:
            problems.append(f"max_epochs is {self.max_epochs}; it must be above 0")
        if self.packing not in get_args(Packing):
            problems.append(f"packing is {self.packing!r}; it must be one of {', '.join(get_args(Packing))}")
        if len(set(self.after)) < len(self.after) or self.name in self.after:
            problems.append(
                f"after is {list(self.after)}; each recipe comes once, and not {self.name} itself"
            )
        if self.ramp and not self.after:
            problems.append(f"ramp starts from {self.ramp.start!r}, but after names no earlier recipe")
        if self.ramp and not 0 < self.ramp.tokens <= self.tokens:
            problems.append(
                f"ramp takes {self.ramp.tokens} tokens; it must be within the phase's {self.tokens}"
            )
        try:
            exact_weights(self.weights, "weights")
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError(f"recipe {self.name}: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> DataConfig:
        """A recipe from the mapping a YAML file holds. ValueError on unknown, missing or mistyped keys."""
        return cls(**_typed(mapping, f"recipe {mapping.get('name', '(no name)')}"))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A recipe reduced to what decides the order: budget, exact weights, ramp."""

    name: str
    tokens: int
    weights: dict[str, Fraction] = field(hash=False)
    ramp: Ramp | None = None

    @classmethod
    def of(cls, config: DataConfig) -> Phase:
        return cls(
            name=config.name,
            tokens=config.tokens,
            weights=exact_weights(config.weights, f"recipe {config.name}"),
            ramp=config.ramp,
        )

    def to_dict(self) -> dict[str, Any]:
        """As written into plan.json; weights as fractions in text."""
        ramp = {"from": self.ramp.start, "tokens": self.ramp.tokens} if self.ramp else None
        weights = {source: str(weight) for source, weight in self.weights.items()}
        return {"name": self.name, "tokens": self.tokens, "weights": weights, "ramp": ramp}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Phase:
        ramp = mapping["ramp"]
        return cls(
            name=mapping["name"],
            tokens=mapping["tokens"],
            weights={source: Fraction(weight) for source, weight in mapping["weights"].items()},
            ramp=Ramp(start=ramp["from"], tokens=ramp["tokens"]) if ramp else None,
        )


def load_recipe(name: str, folder: Path = RECIPE_FOLDER) -> DataConfig:
    """The recipe configs/data/<name>.yaml. ValueError that names the file when it cannot be used."""
    path = folder / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise ValueError(f"there is no recipe {name!r} in {folder}; there are: {known}")
    mapping = read_mapping(path)
    if mapping.get("name") != name:
        raise ValueError(f"{path}: name is {mapping.get('name')!r}, it must equal the file's: {name!r}")
    try:
        return DataConfig.from_dict(mapping)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_phases(config: DataConfig, seq_len: int) -> list[Phase]:
    """The phases before a recipe, in order, and the recipe's own last.

    Raises ValueError where an earlier one orders a shared source differently (other seed, packing or sequence
    length), so that "continue where it stopped" would mean nothing, or where the ramp starts from none of
    them.
    """
    phases = [_earlier_phase(name, config, seq_len) for name in config.after] + [Phase.of(config)]
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise ValueError(f"recipe {config.name}: a phase comes twice in the chain {' + '.join(names)}")
    for i, phase in enumerate(phases):
        if phase.ramp and phase.ramp.start not in names[:i]:
            raise ValueError(
                f"recipe {phase.name}: its ramp starts from {phase.ramp.start!r}, which is not among the "
                f"recipes before it ({', '.join(names[:i]) or 'none'}); add it to after"
            )
    return phases


def _earlier_phase(name: str, config: DataConfig, seq_len: int) -> Phase:
    if name.endswith(".json"):
        try:
            plan = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"recipe {config.name}: after names {name}, which cannot be read: {error}"
            ) from error
        phase = Phase.from_dict(plan["phases"][-1])
        theirs = {"seed": plan["seed"], "packing": plan["packing"], "seq_len": plan["seq_len"]}
    else:
        earlier = load_recipe(name)
        phase = Phase.of(earlier)
        theirs = {"seed": earlier.seed, "packing": earlier.packing, "seq_len": seq_len}
    ours = {"seed": config.seed, "packing": config.packing, "seq_len": seq_len}
    shared = sorted(set(phase.weights) & set(config.weights))
    if shared and theirs != ours:
        raise ValueError(
            f"recipe {config.name} continues {', '.join(shared)} after {phase.name}, but the order differs: "
            f"{theirs} there, {ours} here; make them equal"
        )
    return phase


def _typed(mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a recipe's mapping with their types checked; all problems in one ValueError."""
    problems = []
    known = {f.name for f in fields(DataConfig)}
    required = {"name", "root", "tokens", "weights"}
    problems += [f"unknown key {key!r}" for key in mapping if key not in known]
    problems += [f"missing key {key!r}" for key in sorted(required - set(mapping))]
    values: dict[str, Any] = {key: value for key, value in mapping.items() if key in known}
    for key, kind in {"name": str, "root": str, "tokens": int, "seed": int, "packing": str}.items():
        if key in values and (not isinstance(values[key], kind) or isinstance(values[key], bool)):
            problems.append(f"{key} is {values[key]!r}; it must be of type {kind.__name__}")
    if "max_epochs" in values and not _is_number(values["max_epochs"]):
        problems.append(f"max_epochs is {values['max_epochs']!r}; it must be a number")
    weights = values.get("weights", {})
    if not isinstance(weights, Mapping) or not all(_is_number(weight) for weight in weights.values()):
        problems.append(f"weights is {weights!r}; it must map each source to a number")
    else:
        values["weights"] = dict(weights)
    after = values.get("after", ())
    if isinstance(after, str) or not all(isinstance(name, str) for name in after):
        problems.append(f"after is {after!r}; it must be a list of recipe names")
    else:
        values["after"] = tuple(after)
    ramp = values.get("ramp")
    if ramp is not None:
        if (
            not isinstance(ramp, Mapping)
            or set(ramp) != {"from", "tokens"}
            or not isinstance(ramp["tokens"], int)
        ):
            problems.append(f"ramp is {ramp!r}; it must be {{from: recipe, tokens: number}}")
        else:
            values["ramp"] = Ramp(start=ramp["from"], tokens=ramp["tokens"])
    if problems:
        raise ValueError(f"{where}: " + "; ".join(problems))
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
