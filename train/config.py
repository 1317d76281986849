"""The configuration of one training run: schema, checks between sections, composition. Imports no torch.

`compose` turns Hydra overrides into a frozen `RunConfig` or raises `ConfigError` with every problem found,
before anything is built or allocated. After it nobody sees a dictionary: the launcher writes the resolved
configuration into the run directory once, and ranks read only that (`load_resolved`).

Units: *tokens* are positions trained on, *sequences* are rows of `train.seq_len` tokens, *steps* are
optimizer steps of `train.global_batch_size` sequences. Budgets are given in tokens; steps follow.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from data_mixtures.recipe import DataConfig
from model.config import LaneformerConfig
from train.sections import (
    CheckpointConfig,
    ClusterConfig,
    MetricsConfig,
    OptimConfig,
    ParallelConfig,
    StabilityConfig,
    TrainConfig,
    ValidationConfig,
)
from train.strict import ConfigError, build, plain

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is made from. `name` may hold slashes: `smoke/phase1` lives in runs/smoke/phase1."""

    name: str
    model: LaneformerConfig
    data: DataConfig
    optim: OptimConfig
    parallel: ParallelConfig
    cluster: ClusterConfig
    train: TrainConfig
    runs: str = "runs"
    profile: Literal["off", "on"] = "off"  # trace a few steps of each attempt (train/profiling.py)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)

    def __post_init__(self) -> None:
        problems = cross_checks(self)
        if problems:
            raise ConfigError(problems)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.train.seq_len

    @property
    def steps(self) -> int:
        """Optimizer steps that fit the token budget; the remainder, less than one step, is not trained on."""
        return self.data.tokens // self.tokens_per_step

    @property
    def warmup_steps(self) -> int:
        return math.ceil(self.optim.warmup_tokens / self.tokens_per_step)

    @property
    def decay_steps(self) -> int:
        return math.ceil(self.optim.decay_tokens / self.tokens_per_step)

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the weights."""
        parallel = self.parallel
        return self.cluster.ranks // parallel.replicate if parallel.shard == -1 else parallel.shard

    @property
    def optimizer_bytes(self) -> int:
        """Of all ranks together, float32: AdamW's two moments, and of what Muon takes its momentum alone."""
        both = 8 * self.model.num_parameters()
        if self.optim.name == "adamw":
            return both
        return both - 4 * self.model.num_hidden_layers * self.model._block_matmul_weights()

    @property
    def checkpoint_bytes(self) -> int:
        """float32 weights and the optimizer's state; the rest of a checkpoint is small beside them."""
        return 4 * self.model.num_parameters() + self.optimizer_bytes

    @property
    def most_checkpoints(self) -> int:
        """On disk at once: the latest, one more while it is written and one before it is pruned, the milestones."""
        every = self.checkpoint.milestone_every_steps
        return self.checkpoint.keep_latest + 2 + (self.steps // every if every else 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: what resolved.yaml holds and `from_dict` reads back equal."""
        return plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        problems: list[str] = []
        config = build(cls, values, "", problems)
        if problems:
            raise ConfigError(problems)
        return config


def cross_checks(config: RunConfig) -> list[str]:
    """Problems that no single section can see."""
    train, parallel, cluster, optim = config.train, config.parallel, config.cluster, config.optim
    problems = []
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", config.name):
        problems.append(
            f"name={config.name!r} must be words of letters, digits, '_', '-', '.', joined by '/'"
        )
    if train.seq_len > config.model.max_position_embeddings:
        problems.append(
            f"train.seq_len={train.seq_len} exceeds model.max_position_embeddings="
            f"{config.model.max_position_embeddings}: shorten the sequences or raise the model's context"
        )
    shard = config.shard_ranks
    if shard * parallel.replicate != cluster.ranks:
        problems.append(
            f"parallel.shard={parallel.shard} x parallel.replicate={parallel.replicate} does not make "
            f"cluster.nodes={cluster.nodes} x cluster.ranks_per_node={cluster.ranks_per_node} = {cluster.ranks} ranks"
        )
    rows = train.local_batch_size * cluster.ranks
    if train.global_batch_size % rows:
        problems.append(
            f"train.global_batch_size={train.global_batch_size} is not a multiple of train.local_batch_size="
            f"{train.local_batch_size} x {cluster.ranks} ranks = {rows}"
        )
    if config.steps < 1:
        problems.append(
            f"data.tokens={config.data.tokens} is less than one step of {config.tokens_per_step} tokens"
        )
    elif config.warmup_steps + config.decay_steps > config.steps:
        problems.append(
            f"optim.warmup_tokens={optim.warmup_tokens} and optim.decay_tokens={optim.decay_tokens} need "
            f"{config.warmup_steps} + {config.decay_steps} steps, "
            f"but data.tokens={config.data.tokens} gives {config.steps}"
        )
    if cluster.device == "cpu" and parallel.param_dtype != "float32":
        problems.append(
            f"parallel.param_dtype={parallel.param_dtype} needs cluster.device=cuda, not cpu: use float32"
        )
    if cluster.device == "cpu" and parallel.kernels == "triton":
        problems.append("parallel.kernels=triton needs cluster.device=cuda, not cpu: use auto or torch")
    if cluster.device == "cpu" and parallel.float8:
        problems.append("parallel.float8=true needs cluster.device=cuda, not cpu: use false")
    if train.seq_len % parallel.loss_chunks:
        problems.append(
            f"train.seq_len={train.seq_len} is not a multiple of parallel.loss_chunks={parallel.loss_chunks}"
        )
    if config.data.after and train.init_from is None:
        problems.append(
            f"data.after={list(config.data.after)} continues earlier phases but train.init_from is null: name the run"
            " whose weights this phase starts from"
        )
    return problems


# --- composition


def _schema_defaults() -> dict[str, Any]:
    """The sections that are not Hydra groups, with the schema's defaults; '???' marks what must be given."""

    def values(cls: Any) -> dict[str, Any]:
        return {
            f.name: "???" if f.default is dataclasses.MISSING else plain(f.default)
            for f in dataclasses.fields(cls)
        }

    return {
        "name": "???",
        "runs": "runs",
        "profile": "off",
        "data": values(DataConfig),
        "train": values(TrainConfig),
        "checkpoint": values(CheckpointConfig),
        "validation": values(ValidationConfig),
        "metrics": values(MetricsConfig),
        "stability": values(StabilityConfig),
        "optim": values(OptimConfig),
        "parallel": values(ParallelConfig),
        "cluster": values(ClusterConfig),
    }


def compose(overrides: list[str]) -> RunConfig:
    """Compose configs/train.yaml with Hydra overrides such as `experiment=phase2 optim.lr=2e-4`.

    Raises ConfigError with all problems: unknown keys, wrong types, unresolved variables, contradictions.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema_defaults", node=_schema_defaults())
    try:
        with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
            composed = hydra_compose(config_name="train", overrides=overrides)
        values = OmegaConf.to_container(composed, resolve=True)  # '???' stays and is named by _build
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_one_line(error)]) from error
    assert isinstance(values, dict)
    return RunConfig.from_dict({str(key): value for key, value in values.items()})


def _one_line(error: Exception) -> str:
    unknown = re.match(r"Could not override '([^']*)'", str(error))
    if unknown:
        return f"{unknown[1]} is not a key; `python -m train --help` lists them"
    causes = [str(e).strip() for e in (error, error.__cause__) if e is not None and str(e).strip()]
    return "; ".join(" ".join(text.split()) for text in dict.fromkeys(causes))


def dump_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(config.to_dict(), sort_keys=False)


def load_resolved(path: str | os.PathLike[str]) -> RunConfig:
    """Read a run's resolved.yaml, with the same strict checks as `compose`."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        return RunConfig.from_dict(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError([f"{path} is not YAML: {' '.join(str(error).split())}"]) from error
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


# Between two attempts of one run these may change: they say where and how it runs, and change results by rounding at
# most. What changes the trajectory (`stability` decides which steps end attempts or are passed over) needs
# --allow-change, which records it.
ELASTIC = ("cluster", "parallel", "checkpoint", "metrics", "train.local_batch_size", "runs", "profile")
NOT_ELASTIC = ("parallel.param_dtype",)  # another precision is more than rounding


def changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Lines `key: old -> new` for every value that differs and is not elastic."""

    def flat(value: Any, path: str = "") -> dict[str, Any]:
        if isinstance(value, Mapping):
            return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
        return {path[1:]: value}

    before, after = flat(old.to_dict()), flat(new.to_dict())
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
        and (
            key in NOT_ELASTIC or not any(key == prefix or key.startswith(prefix + ".") for prefix in ELASTIC)
        )
    ]
