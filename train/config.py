"""The configuration of one training run: schema, checks, composition. Imports no torch.

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
from train.strict import ConfigError, build, plain

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


def _require(owner: str, checks: list[tuple[bool, str]]) -> None:
    problems = [f"{owner}.{message}" for ok, message in checks if not ok]
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with a warm-up–stable–decay learning rate (WSD, https://arxiv.org/abs/2404.06395)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    warmup_tokens: int = 0
    decay_tokens: int = 0
    decay_shape: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        _require(
            "optim",
            [
                (self.lr > 0, f"lr={self.lr} must be greater than 0"),
                (all(0 <= b < 1 for b in self.betas), f"betas={self.betas} must lie in [0, 1)"),
                (self.eps > 0, f"eps={self.eps} must be greater than 0"),
                (self.weight_decay >= 0, f"weight_decay={self.weight_decay} must not be negative"),
                (self.max_grad_norm > 0, f"max_grad_norm={self.max_grad_norm} must be greater than 0"),
                (self.warmup_tokens >= 0, f"warmup_tokens={self.warmup_tokens} must not be negative"),
                (self.decay_tokens >= 0, f"decay_tokens={self.decay_tokens} must not be negative"),
                (0 <= self.min_lr_ratio <= 1, f"min_lr_ratio={self.min_lr_ratio} must lie in [0, 1]"),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over ranks: FSDP over `shard` ranks, copies over `replicate` groups (HSDP)."""

    shard: int = -1  # ranks that share one copy of the weights; -1: all that replicate leaves
    replicate: int = 1
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of the gathered weights and activations

    def __post_init__(self) -> None:
        _require(
            "parallel",
            [
                (
                    self.shard == -1 or self.shard >= 1,
                    f"shard={self.shard} must be at least 1, or -1 for the rest",
                ),
                (self.replicate >= 1, f"replicate={self.replicate} must be at least 1"),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines. Only this group knows them."""

    device: Literal["cpu", "cuda"]
    nodes: int = 1
    ranks_per_node: int = 1
    threads_per_rank: int = 1
    expected_tokens_per_second_per_rank: float | None = None  # for --dry-run's days; measured elsewhere
    init_timeout_seconds: int = 600
    step_timeout_seconds: int = 300
    # A step is a hang when it takes longer than hang_factor times the median and than hang_seconds; 0: never.
    hang_factor: float = 30.0
    hang_seconds: float = 120.0

    def __post_init__(self) -> None:
        expected = self.expected_tokens_per_second_per_rank
        _require(
            "cluster",
            [
                (self.nodes >= 1, f"nodes={self.nodes} must be at least 1"),
                (self.ranks_per_node >= 1, f"ranks_per_node={self.ranks_per_node} must be at least 1"),
                (self.threads_per_rank >= 1, f"threads_per_rank={self.threads_per_rank} must be at least 1"),
                (
                    expected is None or expected > 0,
                    f"expected_tokens_per_second_per_rank={expected} must be greater than 0, or null",
                ),
                (
                    self.init_timeout_seconds > 0 and self.step_timeout_seconds > 0,
                    "init_timeout_seconds and step_timeout_seconds must be greater than 0",
                ),
                (
                    self.hang_factor >= 0 and self.hang_seconds >= 0,
                    f"hang_factor={self.hang_factor} and hang_seconds={self.hang_seconds} must not be negative",
                ),
            ],
        )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    seq_len: int
    global_batch_size: int  # sequences an optimizer step
    local_batch_size: int  # sequences a rank holds at once; the rest is gradient accumulation
    seed: int = 0
    deterministic: bool = False
    init_from: str | None = None  # a finished run's name, or a checkpoint directory: its weights only

    def __post_init__(self) -> None:
        _require(
            "train",
            [
                (getattr(self, key) >= 1, f"{key}={getattr(self, key)} must be at least 1")
                for key in ("seq_len", "global_batch_size", "local_batch_size")
            ]
            + [(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2**32)")],
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = 500
    keep_latest: int = 3  # complete checkpoints kept, besides milestones
    milestone_every_steps: int = 0  # checkpoints at these steps are never pruned; 0: none
    asynchronous: bool = True  # write in the background while training goes on
    max_failed_saves: int = 3  # in a row; fewer are told and survived

    def __post_init__(self) -> None:
        milestone = self.milestone_every_steps
        _require(
            "checkpoint",
            [
                (self.every_steps >= 1, f"every_steps={self.every_steps} must be at least 1"),
                (self.keep_latest >= 1, f"keep_latest={self.keep_latest} must be at least 1"),
                (milestone >= 0, f"milestone_every_steps={milestone} must not be negative"),
                (
                    self.max_failed_saves >= 1,
                    f"max_failed_saves={self.max_failed_saves} must be at least 1",
                ),
                (
                    self.every_steps < 1 or milestone < 0 or milestone % self.every_steps == 0,
                    f"milestone_every_steps={milestone} must be a multiple of every_steps={self.every_steps}",
                ),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    every_steps: int = 1000  # also at the first and the last step; 0: never
    sequences_per_source: int = 64

    def __post_init__(self) -> None:
        _require(
            "validation",
            [
                (self.every_steps >= 0, f"every_steps={self.every_steps} must not be negative"),
                (
                    self.sequences_per_source >= 1,
                    f"sequences_per_source={self.sequences_per_source} must be at least 1",
                ),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    every_steps: int = 10
    tensorboard: bool = True
    wandb: bool = True  # offline where WANDB_API_KEY is not set
    wandb_project: str = "laneformer"

    def __post_init__(self) -> None:
        _require(
            "metrics",
            [(self.every_steps >= 1, f"every_steps={self.every_steps} must be at least 1")],
        )


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """What counts as a bad step, and what is done about one that is bad in two attempts (train/bad_steps.py)."""

    skip_steps: int = 0  # steps passed over, the bad one last; 0: it ends every attempt
    max_skips: int = 10  # bad steps in the run's life that may be passed over
    spike_sigmas: float = (
        0.0  # a loss so many robust deviations above the median is bad; 0: only non-finite ones
    )
    spike_window: int = 200  # steps that median and deviation are taken from

    def __post_init__(self) -> None:
        _require(
            "stability",
            [
                (self.skip_steps >= 0, f"skip_steps={self.skip_steps} must not be negative"),
                (self.max_skips >= 0, f"max_skips={self.max_skips} must not be negative"),
                (self.spike_sigmas >= 0, f"spike_sigmas={self.spike_sigmas} must not be negative"),
                (self.spike_window >= 2, f"spike_window={self.spike_window} must be at least 2"),
            ],
        )


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
    def checkpoint_bytes(self) -> int:
        """float32 weights and AdamW's two moments; the rest of a checkpoint is small beside them."""
        return self.model.num_parameters() * 12

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
    shard = cluster.ranks // parallel.replicate if parallel.shard == -1 else parallel.shard
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
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


# Between two attempts of one run these may change: they say where and how it runs, not what is computed. What
# stability does is written down where it happens (bad_steps.jsonl), and set by a person who has seen trouble.
ELASTIC = ("cluster", "parallel", "checkpoint", "metrics", "stability", "train.local_batch_size", "runs")


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
        and not any(key == prefix or key.startswith(prefix + ".") for prefix in ELASTIC)
    ]
