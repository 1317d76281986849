"""The verbs of `python -m model` that generate text."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports torch, which takes a while
    from model.engine import Engine


def generate_text(values: dict[str, Any], switches: set[str]) -> None:
    """Continue a prompt from a checkpoint."""
    from model.chat import summary
    from model.decode import Sampling
    from model.text import TextStream

    sampling = Sampling(temperature=values["temperature"], top_p=values["top_p"], seed=values["seed"])
    as_json = "--json" in switches
    stream = TextStream(values["stop"])

    def show(texts: list[str]) -> None:
        print(stream.push(texts[0]), end="", flush=True)

    with _opened(values) as engine:
        if engine is None:
            return
        if not as_json:
            print(values["prompt"], end="", flush=True)
        (result,), timing = engine.generate(
            [engine.tokenizer.prompt(values["prompt"])],
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
    with _opened(values) as engine:
        if engine is None:
            return
        template = ChatTemplate.of_checkpoint(values["checkpoint"], engine.tokenizer)
        if template is None:
            raise ValueError(
                f"{values['checkpoint']} has no chat_template.jinja; use python -m model generate"
            )
        context, most = engine.sizes.max_position_embeddings, values["max_new_tokens"]
        conversation = Conversation(template, context, room=min(most, context // 4), system=values["system"])
        chat(engine.generate, conversation, most, sampling)


def serve(values: dict[str, Any], switches: set[str]) -> None:
    """Answer HTTP requests from a checkpoint."""
    from model.chat_template import ChatTemplate
    from model.serve import serve
    from model.serve_api import Served

    with _opened(values) as engine:
        if engine is None:
            return
        served = Served(
            name=values["name"] or values["checkpoint"].resolve().name,
            tokenizer=engine.tokenizer,
            template=ChatTemplate.of_checkpoint(values["checkpoint"], engine.tokenizer),
            context=engine.sizes.max_position_embeddings,
            vocab_size=engine.sizes.vocab_size,
            is_whole=engine.is_whole,
        )
        serve(engine.generate, served, values["host"], values["port"], values["queue"])


@contextlib.contextmanager
def _opened(values: dict[str, Any]) -> Iterator[Engine | None]:
    """The checkpoint's engine; None in a process that has only helped, and is done.

    Ends this process with status 1, and a message, if another process of the job is lost.
    """
    from model.engine import Loading, open_engine
    from model.sockets import PeerError

    loading = Loading(checkpoint=values["checkpoint"], weights=values["weights"], device=values["device"])
    try:
        with open_engine(loading, values["lanes"]) or contextlib.nullcontext() as engine:
            yield engine
    except PeerError as error:
        print(f"python -m model: {error}", file=sys.stderr)
        raise SystemExit(1) from None
