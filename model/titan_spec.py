"""The Laneformer as TorchTitan's trainer takes it."""

from functools import partial

from torchtitan.protocols.model_spec import ModelSpec

from model.config import Kernels, LaneformerConfig
from model.laneformer import Laneformer
from model.parallelize import parallelize_laneformer


def model_spec(
    config: LaneformerConfig,
    flavor: str,
    init_seed: int = 0,
    kernels: Kernels = "auto",
    activation_checkpoint: str = "none",
    float8: bool = False,
) -> ModelSpec:
    """What Trainer.Config.model_spec holds; flavor is the size's name, for logs.

    kernels, activation_checkpoint and float8: see set_kernels, set_checkpointing and set_float8 of
    model/parallelize.py. There is no state_dict_adapter: checkpoints keep the internal names, and model/hf.py
    converts at the edge.
    """
    return ModelSpec(
        name="laneformer",
        flavor=flavor,
        model=Laneformer.Config.from_sizes(config, init_seed),
        parallelize_fn=partial(
            parallelize_laneformer,
            kernels=kernels,
            activation_checkpoint=activation_checkpoint,
            float8=float8,
        ),
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
