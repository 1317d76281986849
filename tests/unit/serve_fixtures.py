"""A tiny random model behind a real HTTP server on a free port of this machine, for tests of the server."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from data_mixtures.chat import JINJA_TEMPLATE
from model.chat_template import ChatTemplate
from model.decode import Answers, Generation, Sampling
from model.engine import Loading, open_engine
from model.serve import Server, listen
from model.serve_api import Served
from model.serve_queue import OneAtATime
from model.text import Tokenizer
from tests.unit.eval_fixtures import small_tokenizer, write_checkpoint

CONTEXT = 512
NAME = "tiny"


def checkpoint_with_template(folder: Path) -> Path:
    """A complete checkpoint of a random model of `CONTEXT` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = write_checkpoint(folder / "run", 3, small_tokenizer(folder), longest=CONTEXT)
    shutil.copy(JINJA_TEMPLATE, checkpoint)
    return checkpoint


class Watched:
    """A `generate` that counts its steps, notes its prompts, and takes `pause` seconds longer for each step."""

    def __init__(self, generate: Answers):
        self._generate = generate
        self.reset()

    def reset(self) -> None:
        self.pause = 0.0
        self.steps = 0
        self.prompts: list[list[int]] = []
        self.failure: Exception | None = None

    def __call__(self, prompts: list[list[int]], *, on_token: Any, **how: Any) -> Any:
        def count(texts: list[str]) -> bool:
            self.steps += 1
            time.sleep(self.pause)
            if self.failure:
                raise self.failure
            return on_token(texts)

        self.prompts += prompts
        return self._generate(prompts, on_token=count, **how)

    def alone(self, prompt: list[int], most: int, stops: tuple[str, ...] = (), **how: Any) -> Generation:
        """What the model says without a server."""
        (generation,), _ = self._generate(
            [prompt], max_new_tokens=most, sampling=Sampling(**how), stops=stops
        )
        return generation


@dataclass
class Running:
    """A server under way, and two clients of it: OpenAI's, and one for what that would not send."""

    queue: OneAtATime
    server: Any
    thread: threading.Thread
    openai: openai.OpenAI
    http: httpx.Client
    address: str


@contextlib.contextmanager
def running(
    generate: Answers,
    tokenizer: Tokenizer,
    *,
    waiting: int = 16,
    api_key: str | None = None,
    chat: bool = True,
) -> Iterator[Running]:
    served = Served(
        name=NAME,
        tokenizer=tokenizer,
        template=ChatTemplate(JINJA_TEMPLATE.read_text(), tokenizer) if chat else None,
        context=CONTEXT,
        vocab_size=tokenizer.vocab_size,
    )
    with listen("127.0.0.1", 0, None) as listener, OneAtATime(generate, waiting) as queue:
        server = Server(queue, served, api_key)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        key = api_key or "none is needed"
        try:
            with (
                openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60) as client,
                httpx.Client(base_url=address, timeout=60) as http,
            ):
                yield Running(queue, server, thread, client, http, address)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def eventually(condition: Any, seconds: float = 20) -> None:
    """Wait until something becomes true, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not become true in time"
        time.sleep(0.005)


def load(checkpoint: Path) -> Answers:
    """A checkpoint's `generate`."""
    engine = open_engine(Loading(checkpoint=checkpoint))
    assert engine is not None
    return engine.generate
