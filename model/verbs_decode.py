"""The verbs of `python -m model` that generate text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.command import UsageError


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
