"""`python -m model <verb> key=value … --switch`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.config import LaneformerConfig, load_size, size_names


class UsageError(ValueError):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Verb:
    """One command. `keys` maps each key to (default as text, or None where it must be given; what it is for)."""

    help: str
    run: Callable[[dict[str, str], set[str]], None]
    keys: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Run one command. Mistakes of the user end with status 2 and one message on stderr."""
    name, *words = arguments or ["--help"]
    try:
        if name == "--help":
            print("python -m model <verb> key=value … --switch; <verb> --help lists its keys\n")
            print("\n".join(f"  {verb:<10}{spec.help}" for verb, spec in VERBS.items()))
        elif name not in VERBS:
            raise UsageError(f"there is no verb {name!r}; there are: {', '.join(VERBS)}")
        elif "--help" in words:
            print(_describe(name, VERBS[name]))
        else:
            VERBS[name].run(*_parse(VERBS[name], words))
    except (ValueError, OSError) as error:
        print(f"python -m model {name}: {error}", file=sys.stderr)
        return 2
    return 0


def _describe(name: str, verb: Verb) -> str:
    lines = [f"python -m model {name}: {verb.help}", ""]
    for key, (default, text) in verb.keys.items():
        lines.append(f"  {key}={'(needed)' if default is None else default:<14} {text}")
    lines += [f"  {switch:<20} {text}" for switch, text in verb.switches.items()]
    return "\n".join(lines)


def _parse(verb: Verb, words: list[str]) -> tuple[dict[str, str], set[str]]:
    values = {key: default for key, (default, _) in verb.keys.items() if default is not None}
    switches = {word for word in words if word.startswith("--")}
    problems = [
        f"{word} is not a switch; switches: {', '.join(verb.switches)}"
        for word in switches - set(verb.switches)
    ]
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            continue
        if equals and key in verb.keys:
            values[key] = value
        else:
            problems.append(f"{word!r} is not key=value; keys: {', '.join(verb.keys) or 'none'}")
    problems += [f"{key}= is needed" for key in verb.keys if key not in values]
    if problems:
        raise UsageError("; ".join(problems))
    return values, switches


def _number(values: dict[str, str], key: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(values[key])
    except ValueError:
        raise UsageError(f"{key}={values[key]} must be of type {getattr(kind, '__name__', kind)}") from None


def _dtype(values: dict[str, str]) -> Any:
    import torch

    known = {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if values["dtype"] not in known:
        raise UsageError(f"dtype={values['dtype']} must be one of {', '.join(known)}")
    return known[values["dtype"]]


def sizes(values: dict[str, str], switches: set[str]) -> None:
    """All shipped sizes with what they cost."""
    seq_len = _number(values, "context", int)
    rows = []
    for name in size_names():
        config = load_size(name)
        rows.append(
            {
                "size": name,
                "parameters": config.num_parameters(),
                "lanes": config.num_lanes,
                "decode_bytes": config.decode_bytes(2),
                "kv_bytes": config.kv_bytes(seq_len, 2),
                "train_flops_per_token": config.flops_per_token(seq_len),
            }
        )
    if "--json" in switches:
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"16-bit weights and cache, {seq_len} tokens of context", box=None)
    for header in (
        "size",
        "parameters",
        "lanes",
        "MB a decoded token",
        "KV cache MB",
        "training GFLOP a token",
    ):
        table.add_column(header, justify="left" if header == "size" else "right")
    for row in rows:
        megabytes = [f"{row[key] / 1e6:,.1f}" for key in ("decode_bytes", "kv_bytes")]
        flops = f"{row['train_flops_per_token'] / 1e9:.3f}"
        table.add_row(row["size"], f"{row['parameters']:,}", str(row["lanes"]), *megabytes, flops)
    Console(width=110).print(table)


def logits(values: dict[str, str], switches: set[str]) -> None:
    """Logits of given token ids under given weights, for comparing implementations."""
    import numpy as np
    import torch

    from model.hf import from_released, read_weights
    from model.laneformer import build_model

    dtype = _dtype(values)
    config = LaneformerConfig.from_dict(json.loads(Path(values["config"]).read_text(encoding="utf-8")))
    model = build_model(config, dtype=dtype)
    model.load_state_dict(from_released(read_weights(Path(values["weights"])), config))
    ids_BS = torch.from_numpy(np.load(values["ids"], allow_pickle=False).astype(np.int64))
    positions_BS = None
    if values["positions"]:
        positions_BS = torch.from_numpy(np.load(values["positions"], allow_pickle=False).astype(np.int64))
    outside = (ids_BS < 0) | (ids_BS >= config.vocab_size)
    if ids_BS.dim() != 2 or outside.any():
        raise ValueError(f"{values['ids']}: ids must be (B, S) with values in 0..{config.vocab_size - 1}")
    with torch.no_grad():
        result = model(ids_BS, positions_BS)
    with Path(values["out"]).open("wb") as stream:
        np.save(stream, result.double().numpy() if dtype == torch.float64 else result.float().numpy())


def generate_text(values: dict[str, str], switches: set[str]) -> None:
    """Continue a prompt from a checkpoint."""
    import sentencepiece

    from model.checkpoint import load_checkpoint
    from model.decode import Sampling, generate

    sampling = Sampling(
        temperature=_number(values, "temperature", float),
        top_p=_number(values, "top_p", float),
        seed=_number(values, "seed", int),
    )
    model, _, tokenizer_file = load_checkpoint(values["checkpoint"], _dtype(values), values["device"])
    tokenizer = sentencepiece.SentencePieceProcessor()
    tokenizer.LoadFromSerializedProto(tokenizer_file.read_bytes())
    prompt = [tokenizer.bos_id(), *tokenizer.encode(values["prompt"])]
    as_json = "--json" in switches
    shown = 0

    def show(texts: list[str]) -> None:
        nonlocal shown
        # A character of several bytes is complete only with its last token.
        if not as_json and not texts[0].endswith("\ufffd"):
            print(texts[0][shown:], end="", flush=True)
            shown = len(texts[0])

    if not as_json:
        print(values["prompt"], end="", flush=True)
    (result,), timing = generate(
        model,
        [prompt],
        tokenizer.decode,
        max_new_tokens=_number(values, "max_new_tokens", int),
        sampling=sampling,
        eos_id=tokenizer.eos_id(),
        stops=[values["stop"]] if values["stop"] else [],
        on_token=show,
    )
    told = {**vars(result), **vars(timing)}
    if as_json:
        print(json.dumps({"prompt": values["prompt"], **told}, ensure_ascii=False))
    else:
        print(
            f"\n[{result.end_reason}: {result.prompt_tokens} prompt tokens, {len(result.tokens)} new, first after "
            f"{timing.seconds_to_first_token:.2f} s, then {timing.tokens_per_second:.1f} tokens/s]"
        )


DTYPE = ("float32", "float64, float32, bfloat16 or float16")
VERBS = {
    "sizes": Verb(
        "table of the shipped sizes: parameters, bytes a decoded token, KV cache, training FLOPs",
        sizes,
        {"context": ("4096", "tokens of context for cache and FLOPs")},
        {"--json": "print JSON"},
    ),
    "logits": Verb(
        "logits of token ids under released weights, to compare implementations",
        logits,
        {
            "config": (None, "JSON file of the architecture"),
            "weights": (None, "npz (names with or without `weights/`) or safetensors, released names"),
            "ids": (None, "npy file, integers (B, S)"),
            "positions": (
                "",
                "npy file, integers (B, S), 0 where a document starts; default one document a row",
            ),
            "dtype": DTYPE,
            "out": (None, "npy file to write: logits (B, S, V)"),
        },
    ),
    "generate": Verb(
        "continue a prompt from a training checkpoint",
        generate_text,
        {
            "checkpoint": (None, "a step-N directory"),
            "prompt": ("", "text to continue; BOS is put before it"),
            "max_new_tokens": ("128", "at most so many"),
            "temperature": ("0", "0 takes the likeliest token"),
            "top_p": ("1.0", "keep the smallest set of tokens whose probabilities reach this"),
            "seed": ("0", "of the draws"),
            "stop": ("", "end before this text"),
            "dtype": DTYPE,
            "device": ("cpu", "cpu or cuda"),
        },
        {"--json": "print one JSON object: text, tokens, end_reason, speed"},
    ),
}
