"""The sections of a run's configuration, each with the checks that need no other section. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model.config import Kernels, segment_length
from train.strict import ConfigError


def _require(owner: str, checks: list[tuple[bool, str]]) -> None:
    problems = [f"{owner}.{message}" for ok, message in checks if not ok]
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW or Muon with a warm-up–stable–decay learning rate (WSD, https://arxiv.org/abs/2404.06395)."""

    # muon: orthogonal updates (https://arxiv.org/abs/2502.16982) for the layers' matrices, AdamW for the rest.
    name: Literal["adamw", "muon"] = "adamw"
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[Literal["norms", "embeddings"], ...] = ("norms",)  # parameters that do not shrink
    z_loss: float = 0.0  # weight of the squared log of the softmax's normaliser; PaLM took 1e-4
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
                (
                    len(set(self.no_decay)) == len(self.no_decay),
                    f"no_decay={list(self.no_decay)} repeats itself",
                ),
                (self.z_loss >= 0, f"z_loss={self.z_loss} must not be negative"),
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
    # What backward computes again: none, selective (SwiGLU products), or segments:N (N layers at a time).
    activation_checkpoint: str = "none"
    compile: bool = False
    # What adds partial outputs and norms: our Triton kernel, or torch's operations; auto: Triton on a GPU.
    kernels: Kernels = "auto"
    float8: bool = False  # the blocks' linear maps with float8 inputs, but for the weights' gradients
    loss_chunks: int = 1  # pieces of the sequence whose logits exist at a time; 1: all of them
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of the gathered weights and activations
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # of gradients while ranks add them up

    def __post_init__(self) -> None:
        try:
            segment_length(self.activation_checkpoint)
        except ValueError as error:
            raise ConfigError([f"parallel.activation_checkpoint={error}"]) from None
        _require(
            "parallel",
            [
                (
                    self.shard == -1 or self.shard >= 1,
                    f"shard={self.shard} must be at least 1, or -1 for the rest",
                ),
                (self.replicate >= 1, f"replicate={self.replicate} must be at least 1"),
                (self.loss_chunks >= 1, f"loss_chunks={self.loss_chunks} must be at least 1"),
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
