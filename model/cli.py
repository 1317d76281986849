"""`python -m model`: its verbs and their keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model import verbs, verbs_decode
from model.command import Key, Verb, run

DTYPES = ("float32", "float64", "bfloat16", "float16")


def main(arguments: list[str]) -> int:
    """Run one command; returns its exit status."""
    return run(VERBS, arguments)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return parse


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("a text that is not empty")
    return text


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A parser of integers of at least, and at most."""
    bounds = f"an integer of at least {least}" if most is None else f"an integer of {least} to {most}"

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least or (most and int(text) > most):
            raise ValueError(bounds)
        return int(text)

    return parse


DTYPE = Key(", ".join(DTYPES), _one_of(*DTYPES), "float32")
LOADING = {
    "checkpoint": Key("a step-N directory", Path),
    "weights": Key(f"kept as {', '.join(DTYPES)} or int8", _one_of(*DTYPES, "int8"), "float32"),
    "device": Key("cpu or cuda", _one_of("cpu", "cuda"), "cpu"),
    "lanes": Key(
        "processes to share the lanes: 1, 2, 4, …; torchrun's own number counts too", _integer(1), 1
    ),
}
DRAWING = {
    "max_new_tokens": Key("at most so many", _integer(1), 128),
    "temperature": Key("0 takes the likeliest token", float, 0.0),
    "top_p": Key("keep the smallest set of tokens whose probabilities reach this", float, 1.0),
    "seed": Key("of the draws", int, 0),
}
VERBS = {
    "sizes": Verb(
        "table of the shipped sizes: parameters, bytes a decoded token, KV cache, training FLOPs",
        verbs.sizes,
        {
            "context": Key("tokens of context for cache and FLOPs", _integer(1), 4096),
            "lanes": Key("processes that share the lanes: memory is each one's", _integer(1), 1),
        },
        {"--json": "print JSON: bytes and FLOPs as integers"},
    ),
    "logits": Verb(
        "logits of token ids under released weights, to compare implementations",
        verbs.logits,
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
        verbs_decode.generate_text,
        {
            **LOADING,
            "prompt": Key("text to continue; BOS is put before it", str, ""),
            **DRAWING,
            "stop": Key("end before this text", _not_empty, "", repeats=True),
        },
        {"--json": "print one JSON object: text, tokens, end_reason, speed"},
    ),
    "chat": Verb(
        "talk with a checkpoint in the terminal, by its chat template",
        verbs_decode.chat,
        {**LOADING, **DRAWING, "system": Key("what the model is told before the conversation", str, "")},
    ),
    "serve": Verb(
        "answer HTTP requests in the manner of OpenAI's API, one at a time",
        verbs_decode.serve,
        {
            **LOADING,
            "name": Key("what requests call the model; none: the checkpoint directory's name", str, ""),
            "host": Key(
                "address to listen on; another than this machine's own needs a key", str, "127.0.0.1"
            ),
            "port": Key("0 takes a free one", _integer(0, 65535), 8000),
            "queue": Key("requests that may wait while one is answered", _integer(0), 16),
        },
    ),
    "export": Verb(
        "write a checkpoint as a folder that Hugging Face's transformers loads",
        verbs.export,
        {
            "checkpoint": Key("a step-N directory", Path),
            "out": Key("folder to make", Path),
            "dtype": Key(f"of the weights: {', '.join(DTYPES)}", _one_of(*DTYPES), "bfloat16"),
            "shard_bytes": Key("largest file of weights", _integer(1), 5_000_000_000),
        },
    ),
    "import": Verb(
        "make a checkpoint of an exported folder, or of one in the released layout",
        verbs.import_released,
        {
            "path": Key("folder with config.json and safetensors", Path),
            "out": Key("checkpoint directory to make", Path),
            "tokenizer": Key("SentencePiece model, if the folder has no tokenizer.model", str, ""),
        },
        bare="path",
    ),
}
