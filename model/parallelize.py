"""How the Laneformer is spread over devices: activation checkpointing, then compilation, then FSDP or HSDP.

The order matters: a compiled block contains its checkpointing, and FSDP's hooks lie outside what is compiled.
"""

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from model.laneformer import Laneformer


def parallelize_laneformer(
    model: Laneformer,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
) -> Laneformer:
    """Apply the settings to the model in place, preferably on the meta device.

    A single rank is wrapped too, because FSDP also casts parameters to the training precision.
    """
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)

    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(axes)
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    if mesh.device_type == "cpu":
        _sum_without_scaling(model)
    return model


def _sum_without_scaling(model: torch.nn.Module) -> None:
    """Reduce gradients by a plain sum: gloo has no reduction that scales, which FSDP takes by default."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
