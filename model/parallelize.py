"""How the Laneformer is made fast and spread over devices.

In this order: kernels, float8, activation checkpointing, compilation, then FSDP or HSDP. The order matters: a compiled
block contains its checkpointing, and FSDP's hooks lie outside what is compiled. Segments of several layers are
recomputed around compiled blocks.
"""

import torch
import torch._functorch.config
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from model.blocks import LaneBlock, LaneLinear
from model.config import Kernels, segment_length
from model.laneformer import Laneformer


def set_kernels(model: Laneformer, kernels: Kernels, device_type: str) -> None:
    """Choose what adds partial outputs and norms: our Triton kernel, or torch's operations.

    "auto" takes Triton's on a GPU. Torch's operations are fused by the compiler where blocks are compiled.
    """
    fused = kernels == "triton" or (kernels == "auto" and device_type == "cuda")
    for block in _blocks(model):
        block.fused = fused


def set_checkpointing(model: Laneformer, policy: str) -> None:
    """Choose what the backward pass computes again: "none", "selective" or "segments:N" (model/recompute.py)."""
    model.segment_length = segment_length(policy)
    for block in _blocks(model):
        block.recompute = policy == "selective"


def set_float8(model: Laneformer) -> None:
    """Compute the blocks' linear maps in float8 (model/float8.py); head, norms and attention stay as they are.

    Raises ValueError if a map's sizes do not suit the hardware.
    """
    for block in _blocks(model):
        for name, module in block.named_modules():
            if isinstance(module, LaneLinear):
                sizes = (module.weight.shape[0] // model.sizes.num_lanes, module.weight.shape[1])
                if any(size % 16 for size in sizes):
                    raise ValueError(
                        f"float8 needs multiples of 16, but {name} has {sizes[1]} inputs and {sizes[0]} outputs a "
                        "lane: choose other sizes, or parallel.float8=false"
                    )
                module.float8 = True


def configure_compiler() -> None:
    """The compiler's settings, which are the process's and not the model's."""
    # All kinds of blocks count against one limit, whose default of 8 the 2b size would exceed.
    torch._dynamo.config.recompile_limit = 64
    # By default what a matrix product reads in the backward pass is kept rather than made again: SwiGLU's products, and
    # the weights with their norms' scales, gathered whole from all ranks.
    torch._functorch.config.ban_recompute_materialized_backward = False


def compile_blocks(model: Laneformer, compile_config: CompileConfig, parallel_dims: ParallelDims) -> None:
    """Compile each block whole, and the final norm. Blocks of one kind share their code.

    Kinds differ in how partial outputs are exchanged, and on a GPU in the mask; each is compiled once for
    training and once for validation, which takes no gradients.
    """
    configure_compiler()
    apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    model.norm.compile(backend=compile_config.backend, fullgraph=True)


def parallelize_laneformer(
    model: Laneformer,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
    kernels: Kernels = "auto",
    activation_checkpoint: str = "none",
    float8: bool = False,
) -> Laneformer:
    """Apply the settings to the model in place, preferably on the meta device.

    A single rank is wrapped too, because FSDP also casts parameters to the training precision. TorchTitan's own
    activation checkpointing (ac_config) knows nothing of partial outputs under way and is refused.
    """
    if ac_config is not None:
        raise ValueError(
            f"ac_config is {ac_config}, but must be None: choose activation_checkpoint in model_spec, for a "
            "Laneformer's layers pass more than one tensor"
        )
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(axes)
    set_kernels(model, kernels, mesh.device_type)
    set_checkpointing(model, activation_checkpoint)
    if float8:
        set_float8(model)
    if compile_config.enable and "model" in compile_config.components:
        compile_blocks(model, compile_config, parallel_dims)
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


def _blocks(model: Laneformer) -> list[LaneBlock]:
    return [module for module in model.modules() if isinstance(module, LaneBlock)]


def _sum_without_scaling(model: torch.nn.Module) -> None:
    """Reduce gradients by a plain sum: gloo has no reduction that scales, which FSDP takes by default."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
