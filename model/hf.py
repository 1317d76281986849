"""Released weight names and shapes, in and out.

Inside, a weight is one two-dimensional parameter (L·out, in), and queries, keys and values, or w1 and w3,
share one (model/laneformer.py). Released, they are separate and three-dimensional, (L, out, in), under the
names of the Hugging Face checkpoint. A norm's scale is `….weight` (D,) when replicated and `….scale` (L, D)
per lane.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model.config import LaneformerConfig


def released_shapes(config: LaneformerConfig) -> dict[str, tuple[int, ...]]:
    """Every released tensor's name and shape, in checkpoint order."""
    lanes, width = config.num_lanes, config.hidden_size
    queries = width // lanes
    keys = config.num_key_value_heads * config.head_dim // lanes
    hidden = config.intermediate_size // lanes

    def scale(name: str, per_lane: bool) -> dict[str, tuple[int, ...]]:
        return {f"{name}.scale": (lanes, width)} if per_lane else {f"{name}.weight": (width,)}

    per_lane = not config.replicated_rmsn_scale
    shapes: dict[str, tuple[int, ...]] = {"model.tok_embeddings.weight": (config.vocab_size, width)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.attention.wq.weight": (lanes, queries, width),
            f"{layer}.attention.wk.weight": (lanes, keys, width),
            f"{layer}.attention.wv.weight": (lanes, keys, width),
            f"{layer}.attention.wo.weight": (lanes, width, queries),
            f"{layer}.feed_forward.w1.weight": (lanes, hidden, width),
            f"{layer}.feed_forward.w3.weight": (lanes, hidden, width),
            f"{layer}.feed_forward.w2.weight": (lanes, width, hidden),
            **scale(f"{layer}.attention_norm", per_lane),
            **scale(f"{layer}.ffn_norm", per_lane),
        }
    shapes |= scale("model.norm", per_lane and not config.pre_norm_lane_agg)
    match config.lm_head_type:
        case "replicate" if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, width)
        case "lane":
            shapes["lm_head.linear.weight"] = (config.vocab_size, lanes * width)
        case "vocab_parallel":
            shapes["lm_head.weight"] = (lanes, config.vocab_size // lanes, width)
    return shapes


def internal_names(config: LaneformerConfig) -> dict[str, tuple[str, ...]]:
    """Each internal parameter's name and the released tensors that it holds, in order of a lane's rows."""
    final = "scale" if not config.replicated_rmsn_scale and not config.pre_norm_lane_agg else "weight"
    scale = "weight" if config.replicated_rmsn_scale else "scale"
    head = "lm_head.linear.weight" if config.lm_head_type == "lane" else "lm_head.weight"
    names: dict[str, tuple[str, ...]] = {"tok_embeddings.weight": ("model.tok_embeddings.weight",)}
    for i in range(config.num_hidden_layers):
        inner, outer = f"layers.{i}", f"model.layers.{i}"
        names |= {
            f"{inner}.attention.wqkv.weight": tuple(f"{outer}.attention.w{x}.weight" for x in "qkv"),
            f"{inner}.attention.wo.weight": (f"{outer}.attention.wo.weight",),
            f"{inner}.feed_forward.w13.weight": tuple(f"{outer}.feed_forward.w{x}.weight" for x in "13"),
            f"{inner}.feed_forward.w2.weight": (f"{outer}.feed_forward.w2.weight",),
            f"{inner}.attention_norm.weight": (f"{outer}.attention_norm.{scale}",),
            f"{inner}.ffn_norm.weight": (f"{outer}.ffn_norm.{scale}",),
        }
    names["norm.weight"] = (f"model.norm.{final}",)
    names["lm_head.weight"] = ("model.tok_embeddings.weight" if config.tie_word_embeddings else head,)
    return names


def internal_shapes(config: LaneformerConfig) -> dict[str, tuple[int, ...]]:
    """Every internal parameter's name and shape."""
    released, shapes = released_shapes(config), {}
    for inner, outers in internal_names(config).items():
        shape = released[outers[0]]
        if len(shape) == 3:
            shapes[inner] = (shape[0] * sum(released[outer][1] for outer in outers), shape[2])
        elif outers[0].endswith(".scale"):
            shapes[inner] = (shape[0] * shape[1],)
        else:
            shapes[inner] = shape
    return shapes


def to_released(state: Mapping[str, torch.Tensor], config: LaneformerConfig) -> dict[str, torch.Tensor]:
    """Released tensors from a model's state_dict(). Raises ValueError for missing or foreign names."""
    names, shapes = internal_names(config), released_shapes(config)
    _check_names(set(names), set(state), "model state")
    released = {}
    for inner, outers in names.items():
        # One lane's rows of all released tensors that share the parameter lie next to each other.
        rows = [shapes[outer][1] if len(outers) > 1 else -1 for outer in outers]
        joined = state[inner]
        parts = (
            joined.view(config.num_lanes, sum(rows), -1).split(rows, dim=1) if len(outers) > 1 else [joined]
        )
        for outer, part in zip(outers, parts, strict=True):
            released[outer] = part.reshape(shapes[outer]).contiguous()
    return {name: released[name] for name in shapes}


def from_released(weights: Mapping[str, torch.Tensor], config: LaneformerConfig) -> dict[str, torch.Tensor]:
    """A state for Laneformer.load_state_dict. Raises ValueError that names every wrong tensor."""
    names, shapes = internal_names(config), released_shapes(config)
    _check_names(set(shapes), set(weights), "released weights")
    wrong = [
        f"{name} has shape {tuple(weights[name].shape)}, expected {shape}"
        for name, shape in shapes.items()
        if tuple(weights[name].shape) != shape
    ]
    if wrong:
        raise ValueError(
            "released weights do not fit the configuration:\n" + "\n".join(f"- {w}" for w in wrong)
        )
    state = {}
    for inner, outers in names.items():
        parts = [weights[outer] for outer in outers]
        if len(parts) > 1:
            state[inner] = torch.cat(parts, dim=1).flatten(0, 1)
        elif parts[0].ndim == 3 or outers[0].endswith(".scale"):
            state[inner] = parts[0].flatten(0, 1)
        else:
            state[inner] = parts[0]
    return state


def _check_names(expected: set[str], got: set[str], what: str) -> None:
    problems = [f"missing: {name}" for name in sorted(expected - got)]
    problems += [f"unexpected: {name}" for name in sorted(got - expected)]
    if problems:
        raise ValueError(f"{what} do not fit the configuration:\n" + "\n".join(f"- {p}" for p in problems))


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of an npz or safetensors file, by name. Nothing is unpickled.

    Names in an npz may carry the prefix `weights/`; if any does, the others are not weights. Raises ValueError
    for another kind of file or a damaged one.
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{path}: weights must be a .npz or .safetensors file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with np.load(path, allow_pickle=False) as arrays:
            prefixed = [name for name in arrays.files if name.startswith("weights/")]
            names = prefixed or arrays.files
            return {name.removeprefix("weights/"): torch.from_numpy(arrays[name]) for name in names}
    except (ValueError, TypeError, zipfile.BadZipFile, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
