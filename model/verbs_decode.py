"""The verbs of `python -m model` that generate text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from model.command import UsageError

if TYPE_CHECKING:
    from model.config import LaneformerConfig
    from model.text import Tokenizer


def generate_text(values: dict[str, Any], switches: set[str]) -> None:
    """Continue a prompt from a checkpoint."""
    from model.chat import summary
    from model.decode import Sampling
    from model.text import TextStream

    sampling = Sampling(temperature=values["temperature"], top_p=values["top_p"], seed=values["seed"])
    generate, _, tokenizer = _load(values)
    as_json = "--json" in switches
    stream = TextStream(values["stop"])

    def show(texts: list[str]) -> None:
        print(stream.push(texts[0]), end="", flush=True)

    if not as_json:
        print(values["prompt"], end="", flush=True)
    (result,), timing = generate(
        [tokenizer.prompt(values["prompt"])],
        max_new_tokens=values["max_new_tokens"],
        sampling=sampling,
        stops=values["stop"],
        on_token=None if as_json else show,
    )
    if as_json:
        print(json.dumps({"prompt": values["prompt"], **vars(result), **vars(timing)}, ensure_ascii=False))
        return
    print(stream.finish(result.text))
    print(summary(result, timing))


def chat(values: dict[str, Any], switches: set[str]) -> None:
    """Talk with a checkpoint in the terminal."""
    from model.chat import Conversation, chat
    from model.chat_template import ChatTemplate
    from model.decode import Sampling

    sampling = Sampling(temperature=values["temperature"], top_p=values["top_p"], seed=values["seed"])
    generate, sizes, tokenizer = _load(values)
    template = ChatTemplate.of_checkpoint(values["checkpoint"], tokenizer)
    if template is None:
        raise ValueError(f"{values['checkpoint']} has no chat_template.jinja; use python -m model generate")
    context, most = sizes.max_position_embeddings, values["max_new_tokens"]
    conversation = Conversation(template, context, room=min(most, context // 4), system=values["system"])
    chat(generate, conversation, most, sampling)


def serve(values: dict[str, Any], switches: set[str]) -> None:
    """Answer HTTP requests from a checkpoint."""
    from model.chat_template import ChatTemplate
    from model.serve import serve
    from model.serve_api import Served

    generate, sizes, tokenizer = _load(values)
    served = Served(
        name=values["name"] or values["checkpoint"].resolve().name,
        tokenizer=tokenizer,
        template=ChatTemplate.of_checkpoint(values["checkpoint"], tokenizer),
        context=sizes.max_position_embeddings,
        vocab_size=sizes.vocab_size,
    )
    serve(generate, served, values["host"], values["port"], values["queue"])


def _load(values: dict[str, Any]) -> tuple[Callable[..., Any], LaneformerConfig, Tokenizer]:
    """What generates, the sizes of the model, and its tokenizer."""
    import torch

    from model.checkpoint import load_checkpoint
    from model.decode import generate
    from model.delayed_tp import LaneGroup
    from model.text import Tokenizer

    if values["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda, but torch sees no GPU here")
    dtype = getattr(torch, values["dtype"])
    model, sizes, tokenizer_file = load_checkpoint(values["checkpoint"], dtype, values["device"])
    tokenizer = Tokenizer(tokenizer_file)
    group = LaneGroup.of(model)

    def generate_after(prompts: list[list[int]], **how: Any) -> Any:
        return generate(group, prompts, tokenizer.reader(prompts[0]), eos_id=tokenizer.eos_id, **how)

    return generate_after, sizes, tokenizer
