"""`python -m model <verb> key=value … --switch`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import LaneformerConfig, load_size, size_names

if TYPE_CHECKING:  # torch is imported by the verbs that compute, so that the others answer at once
    import numpy as np

DTYPES = ("float32", "float64", "bfloat16", "float16")


class UsageError(ValueError):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Key:
    """One key=value. parse turns the text into the value; default None means that it must be given.

    Of several values the last counts, unless the key repeats.
    """

    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    repeats: bool = False
    """Whether its value is the list of all that was given."""

    def read(self, name: str, texts: list[str]) -> Any:
        """The value for all that was given under the key's name. Raises UsageError."""
        if not texts and self.default is None:
            raise UsageError(f"{name}= is needed: {self.help}")
        values = []
        for text in texts if self.repeats else texts[-1:]:
            try:
                values.append(self.parse(text))
            except ValueError as error:
                kind = {int: "an integer", float: "a number"}.get(self.parse, str(error))
                raise UsageError(f"{name}={text} must be {kind}") from None
        if self.repeats:
            return values
        return values[0] if values else self.default


@dataclass(frozen=True)
class Verb:
    help: str
    run: Callable[[dict[str, Any], set[str]], None]
    keys: dict[str, Key] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    bare: str = ""
    """The key whose value may be given without its name."""


def main(arguments: list[str]) -> int:
    """Run one command. Mistakes of the user end with status 2 and one message on stderr."""
    name, *words = arguments or ["--help"]
    try:
        if name in ("--help", "-h"):
            print("python -m model <verb> key=value … --switch; <verb> --help lists its keys\n")
            print("\n".join(f"  {verb:<10}{spec.help}" for verb, spec in VERBS.items()))
        elif name not in VERBS:
            raise UsageError(f"there is no verb {name!r}; there are: {', '.join(VERBS)}")
        elif "--help" in words or "-h" in words:
            print(_describe(name, VERBS[name]))
        else:
            VERBS[name].run(*_parse(VERBS[name], words))
    except (ValueError, OSError) as error:
        print(f"python -m model {name}: {error}", file=sys.stderr)
        return 2
    return 0


def _describe(name: str, verb: Verb) -> str:
    lines = [f"python -m model {name}: {verb.help}", ""]
    for key, spec in verb.keys.items():
        default = "(needed)" if spec.default is None else spec.default
        lines.append(f"  {f'{key}={default}':<24} {spec.help}{' (may be repeated)' if spec.repeats else ''}")
    lines += [f"  {switch:<24} {text}" for switch, text in verb.switches.items()]
    return "\n".join(lines)


def _parse(verb: Verb, words: list[str]) -> tuple[dict[str, Any], set[str]]:
    """The value of every key, and the switches given. Raises one UsageError with all problems."""
    given: dict[str, list[str]] = {key: [] for key in verb.keys}
    switches, problems = set(), []
    for word in words:
        key, equals, text = word.partition("=")
        if word in verb.switches:
            switches.add(word)
        elif equals and key in given:
            given[key].append(text)
        elif verb.bare and not given[verb.bare] and not equals and not word.startswith("-"):
            given[verb.bare].append(word)
        elif word.startswith("--"):
            problems.append(f"{word} is not a switch; switches: {', '.join(verb.switches) or 'none'}")
        else:
            problems.append(f"{word!r} is not key=value; keys: {', '.join(verb.keys) or 'none'}")
    values = {}
    for key, spec in verb.keys.items():
        try:
            values[key] = spec.read(key, given[key])
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("; ".join(problems))
    return values, switches


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise ValueError(f"one of {', '.join(DTYPES)}")
    return text


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise ValueError("cpu or cuda")
    return text


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("an integer of at least 1")
    return int(text)


def sizes(values: dict[str, Any], switches: set[str]) -> None:
    """All shipped sizes with what they cost."""
    context = values["context"]
    rows = []
    for name in size_names():
        config = load_size(name)
        rows.append(
            {
                "size": name,
                "parameters": config.num_parameters(),
                "layers": config.num_hidden_layers,
                "width": config.hidden_size,
                "lanes": config.num_lanes,
                "delay": config.broadcast_delay,
                "decode_bytes": config.decode_bytes(2),
                "kv_bytes": config.kv_bytes(context, 2),
                "train_flops_per_token": config.flops_per_token(context),
            }
        )
    if "--json" in switches:
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"16-bit weights and cache, {context} tokens of context", box=None)
    headers = ["size", "parameters", "layers", "width", "lanes", "delay"]
    headers += ["MB a decoded token", "KV cache MB", "training GFLOP a token"]
    for header in headers:
        table.add_column(header, justify="left" if header == "size" else "right")
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("parameters", "layers", "width", "lanes", "delay")]
        megabytes = [f"{row[key] / 1e6:,.1f}" for key in ("decode_bytes", "kv_bytes")]
        table.add_row(row["size"], *counts, *megabytes, f"{row['train_flops_per_token'] / 1e9:.3f}")
    Console(width=120).print(table)


def logits(values: dict[str, Any], switches: set[str]) -> None:
    """Logits of given token ids under given weights, for comparing implementations."""
    import numpy as np
    import torch

    from model.hf import from_released, read_weights
    from model.laneformer import empty_model

    config = _read_config(values["config"])
    ids_BS = _read_integers(values["ids"])
    if ids_BS.min() < 0 or ids_BS.max() >= config.vocab_size:
        raise ValueError(
            f"{values['ids']}: ids {ids_BS.min()}..{ids_BS.max()} leave 0..{config.vocab_size - 1}"
        )
    positions_BS = None
    if values["positions"]:
        positions_BS = _read_integers(Path(values["positions"]))
        _check_positions(values["positions"], positions_BS, ids_BS)
        positions_BS = torch.from_numpy(positions_BS)
    model = empty_model(config, getattr(torch, values["dtype"]), "cpu")
    model.load_state_dict(from_released(read_weights(values["weights"]), config))
    with torch.no_grad():
        result = model(torch.from_numpy(ids_BS), positions_BS)
    result = result.float() if values["dtype"] in ("bfloat16", "float16") else result
    temporary = values["out"].with_name(values["out"].name + ".tmp")
    with temporary.open("wb") as stream:
        np.save(stream, result.numpy())
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(values["out"])


def _read_config(file: Path) -> LaneformerConfig:
    try:
        return LaneformerConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _read_integers(file: Path) -> np.ndarray:
    """An npy file of integers (B, S), as int64."""
    import numpy as np

    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is not an npy file: {error}") from None
    kind = getattr(array, "dtype", None)
    if kind is None or kind.kind not in "iu" or array.ndim != 2 or not array.size:
        raise ValueError(f"{file} must hold integers (B, S), not {kind} {getattr(array, 'shape', '')}")
    return array.astype(np.int64)


def _check_positions(file: str, positions_BS: np.ndarray, ids_BS: np.ndarray) -> None:
    """Positions count up from 0, and start again at 0 where a document does."""
    if positions_BS.shape != ids_BS.shape:
        raise ValueError(f"{file} has shape {positions_BS.shape}, the ids have {ids_BS.shape}")
    follows = positions_BS[:, 1:] == positions_BS[:, :-1] + 1
    if (positions_BS[:, 0] != 0).any() or not (follows | (positions_BS[:, 1:] == 0)).all():
        raise ValueError(f"{file}: positions must start at 0 and each be 0 or one more than the one before")


def generate_text(values: dict[str, Any], switches: set[str]) -> None:
    """Continue a prompt from a checkpoint."""
    import torch

    from model.checkpoint import load_checkpoint
    from model.decode import Sampling, generate

    sampling = Sampling(temperature=values["temperature"], top_p=values["top_p"], seed=values["seed"])
    if values["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda, but torch sees no GPU here")
    model, _, tokenizer_file = load_checkpoint(
        values["checkpoint"], getattr(torch, values["dtype"]), values["device"]
    )
    prompt, decode, eos_id = _tokenize(tokenizer_file, values["prompt"])
    as_json = "--json" in switches
    shown = 0

    def show(texts: list[str]) -> None:
        nonlocal shown
        # A character of several bytes is complete only with its last token.
        if not texts[0].endswith("\ufffd"):
            print(texts[0][shown:], end="", flush=True)
            shown = len(texts[0])

    if not as_json:
        print(values["prompt"], end="", flush=True)
    (result,), timing = generate(
        model,
        [prompt],
        decode,
        max_new_tokens=values["max_new_tokens"],
        sampling=sampling,
        eos_id=eos_id,
        stops=values["stop"],
        on_token=None if as_json else show,
    )
    if as_json:
        print(json.dumps({"prompt": values["prompt"], **vars(result), **vars(timing)}, ensure_ascii=False))
        return
    print(result.text[shown:])
    print(
        f"[{result.end_reason}: {result.prompt_tokens} prompt tokens, {len(result.tokens)} new, first after "
        f"{timing.seconds_to_first_token:.2f} s, then {timing.tokens_per_second:.1f} tokens/s]"
    )


def _tokenize(file: Path, text: str) -> tuple[list[int], Callable[[list[int]], str], int]:
    """The prompt's ids after BOS, a function from new ids to the text they add, and the id of EOS."""
    import sentencepiece

    tokenizer = sentencepiece.SentencePieceProcessor()
    tokenizer.LoadFromSerializedProto(file.read_bytes())
    prompt = [tokenizer.bos_id(), *tokenizer.encode(text)]
    # Llama 2's tokenizer drops the space that a text begins with, so new ids are read after the prompt's last.
    before = tokenizer.decode(prompt[-1:])
    return prompt, lambda ids: tokenizer.decode(prompt[-1:] + ids)[len(before) :], tokenizer.eos_id()


def export(values: dict[str, Any], switches: set[str]) -> None:
    """A checkpoint as a folder for Hugging Face's transformers."""
    import torch

    from model.hf_export import export_checkpoint

    dtype = getattr(torch, values["dtype"])
    out = export_checkpoint(values["checkpoint"], values["out"], dtype, values["shard_bytes"])
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir()):,} bytes in {len([*out.iterdir()])} files")


def import_released(values: dict[str, Any], switches: set[str]) -> None:
    """A folder of Hugging Face's layout as a checkpoint."""
    from model.hf_import import import_folder

    tokenizer = Path(values["tokenizer"]) if values["tokenizer"] else None
    print(import_folder(values["path"], values["out"], tokenizer))


DTYPE = Key(", ".join(DTYPES), _dtype, "float32")
VERBS = {
    "sizes": Verb(
        "table of the shipped sizes: parameters, bytes a decoded token, KV cache, training FLOPs",
        sizes,
        {"context": Key("tokens of context for cache and FLOPs", _at_least_one, 4096)},
        {"--json": "print JSON: bytes and FLOPs as integers"},
    ),
    "logits": Verb(
        "logits of token ids under released weights, to compare implementations",
        logits,
        {
            "config": Key("JSON file of the architecture", Path),
            "weights": Key("npz (names with or without `weights/`) or safetensors, released names", Path),
            "ids": Key("npy file, integers (B, S)", Path),
            "positions": Key(
                "npy file, integers (B, S), 0 where a document starts; none: one a row", str, ""
            ),
            "dtype": DTYPE,
            "out": Key("npy file to write: logits (B, S, V)", Path),
        },
    ),
    "generate": Verb(
        "continue a prompt from a training checkpoint",
        generate_text,
        {
            "checkpoint": Key("a step-N directory", Path),
            "prompt": Key("text to continue; BOS is put before it", str, ""),
            "max_new_tokens": Key("at most so many", _at_least_one, 128),
            "temperature": Key("0 takes the likeliest token", float, 0.0),
            "top_p": Key("keep the smallest set of tokens whose probabilities reach this", float, 1.0),
            "seed": Key("of the draws", int, 0),
            "stop": Key("end before this text", str, "", repeats=True),
            "dtype": DTYPE,
            "device": Key("cpu or cuda", _device, "cpu"),
        },
        {"--json": "print one JSON object: text, tokens, end_reason, speed"},
    ),
    "export": Verb(
        "write a checkpoint as a folder that Hugging Face's transformers loads",
        export,
        {
            "checkpoint": Key("a step-N directory", Path),
            "out": Key("folder to make", Path),
            "dtype": Key(f"of the weights: {', '.join(DTYPES)}", _dtype, "bfloat16"),
            "shard_bytes": Key("largest file of weights", _at_least_one, 5_000_000_000),
        },
    ),
    "import": Verb(
        "make a checkpoint of an exported folder, or of one in the released layout",
        import_released,
        {
            "path": Key("folder with config.json and safetensors", Path),
            "out": Key("checkpoint directory to make", Path),
            "tokenizer": Key("SentencePiece model, if the folder has no tokenizer.model", str, ""),
        },
        bare="path",
    ),
}
