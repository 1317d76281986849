"""Read the config.json of a Laneformer in Hugging Face's layout: ours, or a released one of any age.

Every field is accounted for. It is one of the architecture's, under its present or its older name; or it is known
to change nothing (HARMLESS); or it must have the one value that the architecture implies (IMPLIED). Any other is
refused by name, because it might change what the network computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from model.config import LaneformerConfig

MODEL_TYPES = ("laneformer", "laneformer_tp")

HARMLESS = {
    # what transformers notes about a file, or where code lies
    *("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path"),
    *("_commit_hash", "dtype", "torch_dtype", "_attn_implementation_autoset", "attn_implementation"),
    # tokens and generation: they come from the tokenizer
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "do_sample", "max_length", "temperature"),
    *("top_k", "top_p", "chat_template"),
    # what a forward pass returns, and tasks that are not language modelling
    *("return_dict", "output_attentions", "output_hidden_states", "torchscript", "id2label", "label2id"),
    *("problem_type", "num_labels", "chunk_size_feed_forward", "keys_to_ignore_at_inference"),
    # initial weights and training
    *("initializer_range", "depth_init", "multiple_of", "use_flex_attn", "gradient_checkpointing"),
    # older names, read below
    *("sliding_window_n_layers", "unclamped_layers", "use_comm"),
}

IMPLIED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "rope_scaling": (None,),
    "rope_scaling_args": (None,),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "attn_mask_type": ("causal", "block_causal"),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}

NAMES = tuple(field.name for field in fields(LaneformerConfig))


def read_config(content: Mapping[str, Any], has_head: bool) -> LaneformerConfig:
    """The architecture that a config.json describes.

    has_head says whether the weights hold a head of their own, which settles tie_word_embeddings where the file does
    not say. Raises one ValueError with every problem.
    """
    if content.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"model_type is {content.get('model_type')!r}; only {' and '.join(MODEL_TYPES)} can be imported"
        )
    problems: list[str] = []
    found = {name: content[name] for name in NAMES if name in content}
    if found.get("num_key_value_heads") is None and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    found.setdefault("tie_word_embeddings", not has_head)
    _read_exchange(content, found, problems)
    _read_windows(content, found, problems)
    _read_rotation(content, found, problems)
    problems += [f"{name} is missing" for name in NAMES if name not in found]
    problems += _foreign(content, found)
    if problems:
        raise ValueError("config.json cannot be imported:\n" + "\n".join(f"- {p}" for p in problems))
    return LaneformerConfig.from_dict(found)


def _read_exchange(content: Mapping[str, Any], found: dict[str, Any], problems: list[str]) -> None:
    """use_comm, which older files have, stands for both kinds of exchange."""
    if "use_comm" not in content:
        return
    for name in ("use_attention_comm", "use_mlp_comm"):
        if found.setdefault(name, content["use_comm"]) != content["use_comm"]:
            problems.append(
                f"use_comm is {content['use_comm']} but {name} is {found[name]}: keep one of them"
            )


def _read_windows(content: Mapping[str, Any], found: dict[str, Any], problems: list[str]) -> None:
    """Older files count windowed layers from the front, or the back if negative, and list exceptions."""
    layers = found.get("num_hidden_layers")
    if type(layers) is not int:
        return  # reported elsewhere
    first, exempt = content.get("sliding_window_n_layers"), content.get("unclamped_layers")
    if first is not None and type(first) is not int:
        problems.append(f"sliding_window_n_layers must be an integer, got {first!r}")
        return
    if exempt is not None and not (isinstance(exempt, list) and all(type(i) is int for i in exempt)):
        problems.append(f"unclamped_layers must be a list of integers, got {exempt!r}")
        return
    if first is not None:
        windowed = range(first) if first >= 0 else range(max(layers + first, 0), layers)
        counted = [i for i in windowed if i < layers and i not in (exempt or [])]
        if sorted(found.setdefault("swa_layers", counted)) != counted:
            problems.append(
                f"sliding_window_n_layers {first} and unclamped_layers {exempt or []} mean the layers {counted}, "
                f"but swa_layers says {found['swa_layers']}: keep one of them"
            )
    elif exempt and set(exempt) & set(found.get("swa_layers", [])):
        problems.append(
            f"swa_layers {found['swa_layers']} and unclamped_layers {exempt} contradict each other"
        )
    if "swa_layers" not in found and found.get("sliding_window") is None:
        found["swa_layers"] = []
    if found.get("swa_layers") == []:
        found["sliding_window"] = None  # it has no effect
    types = content.get("layer_types")
    if types is not None and "swa_layers" in found:
        expected = [
            "sliding_attention" if i in found["swa_layers"] else "full_attention" for i in range(layers)
        ]
        if types != expected:
            problems.append(f"layer_types {types} contradict swa_layers {found['swa_layers']}")


def _read_rotation(content: Mapping[str, Any], found: dict[str, Any], problems: list[str]) -> None:
    """rope_theta may lie in rope_parameters; its only type here is the plain one."""
    parameters = content.get("rope_parameters")
    if parameters is None:
        return
    if not isinstance(parameters, Mapping) or parameters.get("rope_type", "default") != "default":
        problems.append(f"rope_parameters must be of rope_type default, got {parameters!r}")
        return
    problems += [
        f"rope_parameters.{key} is not known" for key in parameters if key not in ("rope_type", "rope_theta")
    ]
    theta = parameters.get("rope_theta")
    if theta is not None and found.setdefault("rope_theta", theta) != theta:
        problems.append(f"rope_theta is {found['rope_theta']} but rope_parameters says {theta}")


def _foreign(content: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Fields that are none of the architecture's and not harmless."""
    problems = []
    for name, value in content.items():
        if name in NAMES or name in HARMLESS or name in ("layer_types", "rope_parameters"):
            continue
        if name == "head_dim":
            width, heads = found.get("hidden_size"), found.get("num_attention_heads")
            if width and heads and value not in (None, width // heads):
                problems.append(
                    f"head_dim {value} must be hidden_size / num_attention_heads = {width // heads}"
                )
        elif name not in IMPLIED:
            problems.append(f"{name} = {value!r} is not known and might change what the model computes")
        elif value not in IMPLIED[name]:
            problems.append(f"{name} must be {' or '.join(map(repr, IMPLIED[name]))}, got {value!r}")
    return problems
