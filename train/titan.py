"""RunConfig → torchtitan's Trainer.Config. The only place that knows both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.flex_shard.optimizer_reshard import BlockShard, BucketConfig, ComputeLayout
from torchtitan.trainer import Trainer

from data_mixtures.chat import JINJA_TEMPLATE
from model.config import LaneformerConfig
from model.titan_spec import model_spec
from train.checkpoint import RunCheckpointer
from train.config import RunConfig, load_resolved
from train.loader import MixtureDataLoader, RunTokenizer
from train.loss import loss_config
from train.metrics import RunMetrics
from train.run_dir import RunDir, write_atomic
from train.validate import SourceValidator

DECAY_GROUPS = {"norms": "norm", "embeddings": "tok_embeddings"}  # parts of parameters' names
MATRICES = r"\.(wqkv|wo|w13|w2)\."  # the parameters that Muon takes


def trainer_config(config: RunConfig, run: RunDir, init_from: Path | None) -> Trainer.Config:
    """`init_from` is the checkpoint directory whose weights the run starts from, if any."""
    tokenizer = run.path / "tokenizer.model"
    return Trainer.Config(
        model_spec=model_spec(
            config.model,
            flavor=config.name,
            init_seed=config.train.seed,
            kernels=config.parallel.kernels,
            activation_checkpoint=config.parallel.activation_checkpoint,
            float8=config.parallel.float8,
        ),
        hf_assets_path=os.fspath(tokenizer),
        dump_folder=os.fspath(run.path),
        tokenizer=RunTokenizer.Config(),
        dataloader=MixtureDataLoader.Config(data=config.data, plan_file=os.fspath(run.plan)),
        metrics=metrics(config, run),
        optimizer=optimizer(config),
        lr_scheduler=lr_scheduler(config),
        loss=loss_config(config.parallel.loss_chunks, config.optim.z_loss),
        training=TrainingConfig(
            local_batch_size=config.train.local_batch_size,
            global_batch_size=config.train.global_batch_size,
            seq_len=config.train.seq_len,
            max_norm=config.optim.max_grad_norm,
            steps=config.steps,
            mixed_precision_param=config.parallel.param_dtype,
            # torchtitan's type allows float32 only; FSDP takes either.
            mixed_precision_reduce=config.parallel.reduce_dtype,  # pyright: ignore[reportArgumentType]
            disable_cuda_graphs=True,  # each batch brings its own attention masks
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=config.parallel.shard,
            data_parallel_replicate_degree=config.parallel.replicate,
            fsdp_reshard_after_forward=config.parallel.reshard_after_forward,
            spmd_backend="partial_dtensor",  # the others need torch 2.14
        ),
        checkpoint=RunCheckpointer.Config(
            enable=True,
            folder=run.checkpoints.name,
            interval=config.checkpoint.every_steps,
            keep_latest_k=config.checkpoint.keep_latest,
            milestone_every_steps=config.checkpoint.milestone_every_steps,
            max_failed_saves=config.checkpoint.max_failed_saves,
            async_mode="async" if config.checkpoint.asynchronous else "disabled",
            last_save_model_only=False,  # so that a finished run can be extended
            initial_load_path=os.fspath(init_from) if init_from else None,
            attachments=attachments(config, run),
        ),
        activation_checkpoint=None,  # the model's own, in model_spec
        compile=CompileConfig(enable=config.parallel.compile),
        comm=CommConfig(
            init_timeout_seconds=config.cluster.init_timeout_seconds,
            train_timeout_seconds=config.cluster.step_timeout_seconds,
            save_traces_folder="logs/comm_traces",
        ),
        validator=SourceValidator.Config(
            enable=config.validation.every_steps > 0,
            freq=max(config.validation.every_steps, 1),
            root=config.data.root,
            sources=list(config.data.weights),
            packing=config.data.packing,
            sequences=config.validation.sequences_per_source,
        ),
        debug=DebugConfig(
            seed=config.train.seed,
            deterministic=config.train.deterministic,
            enable_structured_logging=False,
        ),
    )


def attachments(config: RunConfig, run: RunDir) -> dict[str, str]:
    """Files that make each checkpoint usable by itself: model configuration, tokenizer, chat template."""
    model = run.path / "model.json"
    write_atomic(model, json.dumps(config.model.to_dict(), indent=1))
    return {
        "model.json": os.fspath(model),
        "tokenizer.model": os.fspath(run.path / "tokenizer.model"),
        "chat_template.jinja": os.fspath(JINJA_TEMPLATE),
    }


def metrics(config: RunConfig, run: RunDir) -> MetricsProcessor.Config:
    return RunMetrics.Config(
        log_freq=config.metrics.every_steps,
        enable_tensorboard=config.metrics.tensorboard,
        enable_wandb=config.metrics.wandb,
        disable_color_printing=True,
        run=os.fspath(run.path),
        name=config.name,
        total_steps=config.steps,
        tokens_per_step=config.tokens_per_step,
        wandb_project=config.metrics.wandb_project,
        wandb_group=chain_name(config),
        resolved=config.to_dict(),
    )


def chain_name(config: RunConfig) -> str:
    """What the phases of one training have in common: the folder of their names, else the first phase's name."""
    folder, _, _ = config.name.rpartition("/")
    if folder:
        return folder
    before = config.train.init_from
    earlier = RunDir(Path(config.runs) / before).resolved if before else None
    return chain_name(load_resolved(earlier)) if earlier and earlier.exists() else config.name


def optimizer(config: RunConfig) -> OptimizersContainer.Config:
    """AdamW, or Muon for the layers' matrices and AdamW for the rest.

    There is no weight decay on the kinds of parameters in optim.no_decay. A tied embedding is one matrix with the head
    and goes by the embedding's name.
    """
    optim = config.optim
    adamw = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}

    def group(pattern: str, weight_decay: float) -> ParamGroupConfig:
        kwargs = {**adamw, "weight_decay": weight_decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)

    exempt = [group(DECAY_GROUPS[kind], 0.0) for kind in optim.no_decay]
    muon = optim.name == "muon"
    none_left = muon and config.model.tie_word_embeddings and len(exempt) == len(DECAY_GROUPS)
    groups = exempt if none_left else [*exempt, group(".*", optim.weight_decay)]  # each must have parameters
    if not muon:
        return OptimizersContainer.Config(param_groups=groups)
    kwargs = {
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",  # updates as large as AdamW's, whatever a matrix's shape
        "fused": False,
    }
    matrices = ParamGroupConfig(pattern=MATRICES, optimizer_name="DistMuon", optimizer_kwargs=kwargs)
    return OptimizersContainer.Config(
        param_groups=[matrices, *groups],
        optimizer_factory_kwargs_by_name={"DistMuon": muon_matrices(config.model)},
    )


def muon_matrices(sizes: LaneformerConfig) -> dict[str, Any]:
    """Which rows of the layers' weights are a matrix of their own, whose update Muon makes orthogonal by itself.

    A weight (L·O, I) stacks the lanes' maps: in wqkv those of a lane's query, key and value heads, (E, D) each; in w13
    a lane's w1 and w3; in wo and w2 one of each lane. A rank computes whole matrices, and ranks exchange rows where
    their shards cut one; on a GPU one layer's exchange runs while another's matrices are computed.
    """
    rows = {
        "attention.wqkv": sizes.head_dim,
        "attention.wo": sizes.hidden_size,
        "feed_forward.w13": sizes.intermediate_size // sizes.num_lanes,
        "feed_forward.w2": sizes.hidden_size,
    }
    layers = range(sizes.num_hidden_layers)
    return {
        "compute_sharding_by_fqn": {
            f"layers.{layer}.{name}.weight": ComputeLayout({"fsdp": BlockShard(0, height)})
            for layer in layers
            for name, height in rows.items()
        },
        "bucket_configs": [BucketConfig((f"layers.{layer}.*",), name=f"layer {layer}") for layer in layers],
    }


def lr_scheduler(config: RunConfig) -> LRSchedulersContainer.Config:
    """Linear warm-up, stable, then the decay over the run's last `decay_steps`; no decay when there are none."""
    return LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps,
        decay_ratio=config.decay_steps / config.steps,
        decay_type=config.optim.decay_shape,
        min_lr_factor=config.optim.min_lr_ratio,
    )
