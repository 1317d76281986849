"""The server with many requests, with clients that hang up, and its ends: one request at a time, and none forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from model import serve
from model.cli import main
from model.text import Tokenizer
from tests.unit.serve_fixtures import (
    NAME,
    Running,
    Watched,
    checkpoint_with_template,
    eventually,
    load,
    running,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_with_template(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint / "tokenizer.model")


@pytest.fixture(scope="module")
def watched(checkpoint: Path) -> Watched:
    return Watched(load(checkpoint))


@pytest.fixture
def model(watched: Watched) -> Watched:
    watched.reset()
    return watched


@pytest.fixture
def server(model: Watched, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(model, tokenizer, waiting=8) as server:
        yield server


def ask(server: Running, prompt: list[int], most: int = 8, **how: Any) -> Any:
    """Greedy, and never at an end before `most`: the model's end of text is no stop for a cut context."""
    return server.openai.completions.create(model=NAME, prompt=prompt, max_tokens=most, temperature=0, **how)


def long_prompt(model: Watched) -> list[int]:
    """A prompt after which the model goes on for 300 tokens."""
    for first in range(3, 384):
        if len(model.alone([1, first], 300).tokens) == 300:
            return [1, first]
    raise AssertionError("the model ends everything early")


def test_many_at_once_are_answered_in_turn_each_rightly(server: Running, model: Watched) -> None:
    prompts = [[1, 10 + i, 20 + i] for i in range(8)]
    expected = [model.alone(prompt, 8).text for prompt in prompts]
    model.pause = 0.02
    answers: dict[int, str] = {}

    def one(i: int) -> None:
        if i % 2:
            answers[i] = ask(server, prompts[i]).choices[0].text
        else:
            answers[i] = "".join(c.choices[0].text for c in ask(server, prompts[i], stream=True))

    with ThreadPoolExecutor(8) as pool:
        for i in range(8):
            pool.submit(one, i)
            eventually(lambda i=i: len(server.queue._jobs) + len(answers) > i)
    assert [answers[i] for i in range(8)] == expected
    assert model.prompts == prompts


def test_a_full_queue_says_when_to_come_again(model: Watched, tokenizer: Tokenizer) -> None:
    prompt = long_prompt(model)
    model.pause = 0.01
    with running(model, tokenizer, waiting=1) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server, prompt, 200)
        eventually(lambda: model.steps)
        second = pool.submit(ask, server, prompt, 1)
        eventually(lambda: server.queue.waiting)
        began = time.monotonic()
        assert server.http.get("/health").json() == {"status": "ok", "busy": True, "waiting": 1}
        assert server.http.get("/v1/models").status_code == 200
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="1 requests are waiting, as many as may") as told:
                ask(server, prompt, stream=stream)
            assert told.value.code == "queue_full"
            assert int(told.value.response.headers["retry-after"]) >= 1
        assert time.monotonic() - began < 1
        assert first.result().usage.completion_tokens == 200
        assert second.result().usage.completion_tokens == 1
        assert ask(server, prompt, 1).choices
        assert len(model.prompts) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_ends_the_generation(server: Running, model: Watched, stream: bool) -> None:
    prompt = long_prompt(model)
    model.pause = 0.02
    if stream:
        events = ask(server, prompt, 300, stream=True)
        for _ in range(3):
            next(events)
        events.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            ask(server, prompt, 300, timeout=0.2)
    eventually(lambda: not server.queue.busy, 2)  # 300 steps take 6 s
    steps = model.steps
    assert 3 <= steps < 60
    began = time.monotonic()
    assert ask(server, prompt, 5).usage.completion_tokens == 5
    assert time.monotonic() - began < 2
    assert model.steps == steps + 5


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_while_waiting_is_never_generated(server: Running, model: Watched, stream: bool) -> None:
    prompt = long_prompt(model)
    model.pause = 0.01
    first = ask(server, prompt, 300, stream=True)
    next(first)
    with pytest.raises(openai.APITimeoutError):
        list(ask(server, [1, 7], stream=stream, timeout=0.2))
    eventually(lambda: server.queue.waiting == 0, 2)
    first.close()
    eventually(lambda: not server.queue.busy, 2)
    assert ask(server, prompt, 1).choices
    assert model.prompts == [prompt, prompt]


def test_a_model_that_dies_ends_the_server(model: Watched, tokenizer: Tokenizer) -> None:
    model.pause, model.failure = 0.05, RuntimeError("process 3 is gone")
    with running(model, tokenizer) as server, ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(lambda: list(ask(server, [1, 5], stream=True)))
        whole = pool.submit(ask, server, [1, 6])
        for job in (streamed, whole):
            with pytest.raises(openai.APIError, match="the model failed; the server ends"):
                job.result()
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert str(server.queue.failure) == "process 3 is gone"


def test_a_model_that_refuses_does_not(server: Running, model: Watched) -> None:
    model.failure = ValueError("no such thing")
    with pytest.raises(openai.BadRequestError, match="no such thing"):
        ask(server, [1, 5])
    with pytest.raises(openai.APIError, match="no such thing"):
        list(ask(server, [1, 5], stream=True))
    model.failure = None
    assert ask(server, [1, 5]).choices


def test_the_end_waits_for_answers_under_way(model: Watched, tokenizer: Tokenizer) -> None:
    prompt = long_prompt(model)
    model.pause = 0.01
    with running(model, tokenizer) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, prompt, 60)
        eventually(lambda: model.steps)
        server.server.should_exit = True
        assert answer.result().usage.completion_tokens == 60
        server.thread.join(10)
        with pytest.raises(openai.APIConnectionError):
            ask(server, prompt)


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_does_not_wait_for_ever(
    model: Watched, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(serve, "GRACE_SECONDS", 1)
    prompt = long_prompt(model)
    model.pause = 0.05
    with running(model, tokenizer) as server, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(lambda: list(ask(server, prompt, 300, stream=stream)))
        eventually(lambda: model.steps)
        waits = pool.submit(ask, server, [1, 5])
        eventually(lambda: server.queue.waiting)
        server.server.should_exit = True
        for job in (answer, waits):
            with pytest.raises(openai.APIError, match="the request is cancelled: the server ends"):
                job.result()
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert model.steps < 60


def test_addresses() -> None:
    for host in ("0.0.0.0", "", "::"):
        with pytest.raises(ValueError, match="can be reached from other machines: set LANEFORMER_API_KEY"):
            serve.listen(host, 0, None)
    serve.listen("0.0.0.0", 0, "key").close()
    with serve.listen("localhost", 0, None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=f"cannot listen on host=localhost port={port}: Address already in use"
        ):
            serve.listen("localhost", port, None)
    with pytest.raises(OSError, match=r"host=nowhere\.invalid is no address of this machine"):
        serve.listen("nowhere.invalid", 0, None)


def test_the_command(checkpoint: Path) -> None:
    environment = os.environ | {"LANEFORMER_API_KEY": "s3cret"}
    words = ["-m", "model", "serve", f"checkpoint={checkpoint}", "port=0", "name=mine"]
    with subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving mine at http://127.0.0.1:")
            url = line.split()[-1]
            with openai.OpenAI(base_url=url, api_key="s3cret", max_retries=0, timeout=60) as client:
                question: Any = [{"role": "user", "content": "the fox and s0me private text"}]
                answer = client.chat.completions.create(model="mine", messages=question, max_tokens=3)
                assert answer.usage is not None
                assert answer.usage.completion_tokens <= 3
                with pytest.raises(openai.AuthenticationError):
                    client.with_options(api_key="wr0ng").models.list()
            process.send_signal(signal.SIGTERM)
            out, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "POST /v1/chat/completions" in out
    assert f" {answer.usage.prompt_tokens} prompt tokens, {answer.usage.completion_tokens} new" in error
    assert not [secret for secret in ("s3cret", "wr0ng", "s0me") if secret in out + error]


def test_mistakes_at_the_start(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LANEFORMER_API_KEY", raising=False)
    assert main(["serve", f"checkpoint={checkpoint}", "host=0.0.0.0"]) == 2
    assert "host=0.0.0.0 can be reached from other machines" in capsys.readouterr().err
    assert main(["serve", "checkpoint=nowhere", "port=70000"]) == 2
    assert "port=70000 must be an integer of 0 to 65535" in capsys.readouterr().err
