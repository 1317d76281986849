"""The verbs of `python -m model` that generate text."""

from __future__ import annotations

import json
from typing import Any

from model.command import UsageError


def generate_text(values: dict[str, Any], switches: set[str]) -> None:
    """Continue a prompt from a checkpoint."""
    import torch

    from model.checkpoint import load_checkpoint
    from model.decode import Sampling, generate
    from model.text import TextStream, Tokenizer

    sampling = Sampling(temperature=values["temperature"], top_p=values["top_p"], seed=values["seed"])
    if values["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda, but torch sees no GPU here")
    model, _, tokenizer_file = load_checkpoint(
        values["checkpoint"], getattr(torch, values["dtype"]), values["device"]
    )
    tokenizer = Tokenizer(tokenizer_file)
    prompt = tokenizer.prompt(values["prompt"])
    as_json = "--json" in switches
    stream = TextStream(values["stop"])

    def show(texts: list[str]) -> None:
        print(stream.push(texts[0]), end="", flush=True)

    if not as_json:
        print(values["prompt"], end="", flush=True)
    (result,), timing = generate(
        model,
        [prompt],
        tokenizer.reader(prompt),
        max_new_tokens=values["max_new_tokens"],
        sampling=sampling,
        eos_id=tokenizer.eos_id,
        stops=values["stop"],
        on_token=None if as_json else show,
    )
    if as_json:
        print(json.dumps({"prompt": values["prompt"], **vars(result), **vars(timing)}, ensure_ascii=False))
        return
    print(stream.finish(result.text))
    print(
        f"[{result.end_reason}: {result.prompt_tokens} prompt tokens, {len(result.tokens)} new, first after "
        f"{timing.seconds_to_first_token:.2f} s, then {timing.tokens_per_second:.1f} tokens/s]"
    )
