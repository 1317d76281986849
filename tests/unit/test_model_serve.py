"""`python -m model serve`, driven by OpenAI's own client over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from data_mixtures.chat import encode_prompt
from data_mixtures.tokenizer import Tokenizer as TrainingTokenizer
from model.serve_api import Served, build_app
from model.serve_queue import OneAtATime
from model.text import Tokenizer
from tests.unit.serve_fixtures import CONTEXT, NAME, Running, Watched, checkpoint_with_template, load, running

QUESTION: list[Any] = [
    {"role": "system", "content": "the quick fox"},
    {"role": "user", "content": "jumps over </s> the?"},
    {"role": "assistant", "content": "lazy dog"},
    {"role": "user", "content": "and\u2581a cat"},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_with_template(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint / "tokenizer.model")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Watched:
    return Watched(load(checkpoint))


@pytest.fixture(scope="module")
def shared(model: Watched, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(model, tokenizer) as server:
        yield server


@pytest.fixture
def server(shared: Running, model: Watched) -> Running:
    model.reset()
    return shared


def chat(server: Running, **how: Any) -> Any:
    return server.openai.chat.completions.create(
        **{"model": NAME, "messages": QUESTION, "max_tokens": 20} | how
    )


def complete(server: Running, **how: Any) -> Any:
    return server.openai.completions.create(
        **{"model": NAME, "prompt": "the quick brown", "max_tokens": 20, "temperature": 0} | how
    )


def test_a_chat_is_answered_from_the_tokens_of_training(
    server: Running, model: Watched, checkpoint: Path
) -> None:
    answer = chat(server, temperature=0)
    prompt = encode_prompt(TrainingTokenizer(checkpoint / "tokenizer.model"), QUESTION)
    assert model.prompts == [prompt]
    alone = model.alone(prompt, 20)
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[alone.end_reason]
    assert (answer.object, answer.model, len(answer.choices)) == ("chat.completion", NAME, 1)
    new = len(alone.tokens)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": new,
        "total_tokens": len(prompt) + new,
    }


def test_a_completion_continues_a_text_or_token_ids(
    server: Running, model: Watched, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.prompt("the quick brown")
    alone = model.alone(prompt, 20)
    for given in ("the quick brown", prompt, ["the quick brown"], [prompt]):
        answer = complete(server, prompt=given)
        assert answer.choices[0].text == alone.text
        assert (answer.object, answer.usage.prompt_tokens) == ("text_completion", len(prompt))
    assert model.prompts == [prompt] * 4
    assert complete(server, prompt="").usage.prompt_tokens == 1  # BOS


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}])
@pytest.mark.parametrize("ask", [chat, complete])
def test_streaming_gives_the_same(server: Running, ask: Any, how: dict[str, Any]) -> None:
    whole = ask(server, **how)
    *chunks, last = ask(server, **how, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == whole.usage
    choices = [chunk.choices[0] for chunk in chunks]
    if ask is chat:
        assert [c.delta.role for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
        parts = [c.delta.content or "" for c in choices]
        assert "".join(parts) == whole.choices[0].message.content
    else:
        parts = [c.text for c in choices]
        assert "".join(parts) == whole.choices[0].text
    assert len([part for part in parts if part]) > 3
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + [
        whole.choices[0].finish_reason
    ]
    assert len({(chunk.id, chunk.object, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].object == ("chat.completion.chunk" if ask is chat else "text_completion")
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in ask(server, **how, stream=True))  # no usage unless asked for


def test_seeds(server: Running) -> None:
    def text(**how: Any) -> str:
        return complete(server, **{"temperature": 1.0} | how).choices[0].text

    assert text(seed=7) == text(seed=7)
    assert text(seed=7) != text(seed=8)
    assert text() != text()  # without a seed, each is another draw
    assert text(seed=7, top_p=1e-6) == text(temperature=0)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(server: Running, model: Watched, tokenizer: Tokenizer, stream: bool) -> None:
    prompt = tokenizer.prompt("the quick brown")
    text = model.alone(prompt, 60).text
    stop = text[20:23]
    for given in (stop, ["never said", stop]):
        answer = complete(server, max_tokens=60, stop=given, stream=stream)
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    model.reset()
    complete(server, max_tokens=60, stop=stop)
    assert model.steps < 60


def test_lengths(server: Running) -> None:
    short = complete(server, max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    default = complete(server, max_tokens=openai.omit)
    assert default.usage.completion_tokens <= 16
    full = complete(server, prompt=[5] * (CONTEXT - 9), max_tokens=10**6)
    assert full.usage.completion_tokens <= 10  # the last token needs no place
    assert full.choices[0].finish_reason in ("stop", "length")
    assert chat(server, max_tokens=openai.omit, max_completion_tokens=4).usage.completion_tokens <= 4


def test_fields_that_change_nothing_are_taken(server: Running) -> None:
    plain = chat(server, temperature=0).choices[0].message
    neutral = chat(
        server,
        temperature=0,
        n=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        presence_penalty=0.0,
        frequency_penalty=0,
        logit_bias={},
        logprobs=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        service_tier="auto",
        extra_body={"seed": None, "stop": None, "reasoning_effort": None, "functions": None},
    )
    assert neutral.choices[0].message == plain
    # An answer comes back as it was given, with its fields that are null; parts of text are one text.
    parts = [{"type": "text", "text": "and"}, {"type": "text", "text": "\u2581a cat"}]
    messages = [
        {"role": "developer", "content": QUESTION[0]["content"]},
        *QUESTION[1:2],
        plain.model_dump() | {"content": QUESTION[2]["content"]},
        {"role": "user", "content": parts, "name": "me"},
    ]
    assert chat(server, temperature=0, messages=messages).choices[0].message == plain


WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("completions", {"n": 2}, "n", "n=2 is not supported; leave it out, or 1"),
    ("completions", {"logprobs": 0}, "logprobs", "logprobs=0 is not supported; leave it out, or False"),
    ("completions", {"echo": True}, "echo", "echo=True is not supported"),
    ("completions", {"best_of": 3}, "best_of", "best_of=3"),
    ("completions", {"suffix": "x"}, "suffix", "suffix='x'"),
    ("completions", {"presence_penalty": 0.5}, "presence_penalty", "presence_penalty=0.5"),
    ("completions", {"logit_bias": {"5": 1}}, "logit_bias", "logit_bias={'5': 1}"),
    ("completions", {"top_k": 5}, "top_k", "top_k: unknown, or not supported"),
    ("completions", {"prompt": None}, "prompt", "prompt: Field required"),
    ("completions", {"prompt": 5}, "prompt", "prompt.str: Input should be a valid string"),
    ("completions", {"prompt": []}, "prompt", "prompt must be one prompt, not 0"),
    ("completions", {"prompt": [[]]}, "prompt", "prompt must hold token ids, at least one"),
    (
        "completions",
        {"prompt": ["a", "b"]},
        "prompt",
        "prompt must be one prompt, not 2: send one request for each",
    ),
    ("completions", {"prompt": [1, -1]}, "prompt", "prompt must hold token ids, at least one, of 0..383"),
    ("completions", {"prompt": [1, 384]}, "prompt", "of 0..383"),
    ("completions", {"prompt": [1, "a"]}, "prompt", "Input should be a valid integer"),
    ("completions", {"prompt": [5] * 513}, "prompt", "prompt has 513 tokens, the model's context 512"),
    ("completions", {"prompt": "\ud800"}, "prompt", "not valid Unicode at character 0"),
    ("completions", {"\ud800": 1}, None, "valid string"),
    ("completions", {"n": "\ud800"}, "n", "is not supported"),
    ("completions", {"model": None}, "model", "model: Field required"),
    (
        "completions",
        {"max_tokens": 0},
        "max_tokens",
        "max_tokens: Input should be greater than or equal to 1",
    ),
    ("completions", {"max_tokens": 2.5}, "max_tokens", "valid integer"),
    ("completions", {"max_tokens": "9"}, "max_tokens", "valid integer"),
    ("completions", {"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ("completions", {"temperature": "hot"}, "temperature", "valid number"),
    ("completions", {"temperature": float("nan")}, "temperature", "finite number"),
    ("completions", {"top_p": 0}, "top_p", "greater than 0"),
    ("completions", {"seed": -1}, "seed", "greater than or equal to 0"),
    ("completions", {"seed": 2**62}, "seed", "less than"),
    ("completions", {"stop": ["a"] * 5}, "stop", "stop must be up to 4 texts, none empty"),
    ("completions", {"stop": ""}, "stop", "none empty"),
    ("completions", {"stop": [1]}, "stop", "valid string"),
    ("completions", {"stream": "yes"}, "stream", "valid boolean"),
    (
        "completions",
        {"stream_options": {"usage": True}},
        "stream_options",
        "usage: unknown, or not supported",
    ),
    ("completions", {"temperature": 5, "top_p": 5}, None, "temperature: "),
    ("chat/completions", {"messages": []}, "messages", "the last message must be by 'user'"),
    ("chat/completions", {"messages": "hi"}, "messages", "valid list"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": " "}]},
        "messages",
        "message 0 (user) is empty",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages",
        "'system', 'developer'",
    ),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages", "messages.0.content: Field required"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "Input should be 'text'",
    ),
    ("chat/completions", {"messages": QUESTION[1:3]}, "messages", "the last message must be by 'user'"),
    (
        "chat/completions",
        {"messages": QUESTION[1:2] * 2},
        "messages",
        "message 1 is by 'user', expected 'assistant'",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "fox " * 600}]},
        "messages",
        "context 512",
    ),
    (
        "chat/completions",
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_tokens",
        "contradict each other",
    ),
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "not supported"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort", "unknown, or not supported"),
]


@pytest.mark.parametrize(("path", "fields", "param", "message"), WRONG)
def test_requests_that_are_refused(
    server: Running, model: Watched, path: str, fields: dict[str, Any], param: str | None, message: str
) -> None:

    first = {"prompt": "a"} if path == "completions" else {"messages": QUESTION}
    body = json.dumps({"model": NAME, "max_tokens": 2} | first | fields)
    reply = server.http.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert model.prompts == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"", "Field required"),
        (b"\xff\xfe", ""),
        (b"5", "valid dictionary"),
        (b"[" * 100_000, ""),
        (b'{"seed": ' + b"9" * 5000 + b"}", ""),
    ],
)
def test_bodies_that_are_no_requests(server: Running, body: bytes, message: str) -> None:
    reply = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_bodies_that_do_not_say_that_they_are_json(server: Running, model: Watched) -> None:
    """A page in a browser may send such a one to any address without being asked."""
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = server.http.post(
            "/v1/completions", content=body, headers={"Content-Type": kind} if kind else {}
        )
        assert reply.status_code == 400
        assert "Content-Type: application/json" in reply.json()["error"]["message"]
    assert model.prompts == []


def test_too_long_a_prompt_has_openais_code(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt has 513 tokens") as told:
        complete(server, prompt=[5] * (CONTEXT + 1))
    assert told.value.code == "context_length_exceeded"


def test_a_body_that_is_too_large(server: Running, model: Watched) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than 1,048,576 bytes") as told:
        complete(server, prompt="a" * 2_000_000)
    assert (told.value.status_code, told.value.code) == (413, "request_too_large")

    def pieces() -> Iterator[bytes]:  # without a length
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(40):
            yield b"a" * 50_000

    reply = server.http.post(
        "/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert model.prompts == []
    assert complete(server, max_tokens=2).usage.completion_tokens == 2


def test_models_and_unknown_paths(server: Running) -> None:
    assert [m.id for m in server.openai.models.list()] == [NAME]
    assert server.openai.models.retrieve(NAME).id == NAME
    for ask in (lambda: server.openai.models.retrieve("gpt"), lambda: complete(server, model="gpt")):
        with pytest.raises(
            openai.NotFoundError, match="the model 'gpt' is not served here; 'tiny' is"
        ) as told:
            ask()
        assert (told.value.code, told.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        server.openai.embeddings.create(model=NAME, input="a")
    reply = server.http.get("/v1/completions")
    assert (reply.status_code, reply.json()["error"]["message"]) == (405, "Method Not Allowed")
    assert server.http.get("/health").json() == {"status": "ok", "busy": False, "waiting": 0}


def test_a_checkpoint_without_template_completes_only(model: Watched, tokenizer: Tokenizer) -> None:
    model.reset()
    with running(model, tokenizer, chat=False) as server:
        with pytest.raises(openai.BadRequestError, match="tiny has no chat template; use /v1/completions"):
            chat(server)
        assert complete(server).choices


def test_health_tells_of_a_lost_process(model: Watched, tokenizer: Tokenizer) -> None:
    alive = [True]
    served = Served(
        name=NAME,
        tokenizer=tokenizer,
        template=None,
        context=CONTEXT,
        vocab_size=tokenizer.vocab_size,
        is_whole=lambda: alive[0],
    )
    with OneAtATime(model, 1) as queue, TestClient(build_app(queue, served)) as client:
        assert client.get("/health").status_code == 200
        alive[0] = False
        assert (client.get("/health").status_code, client.get("/health").json()) == (
            503,
            {"status": "failed"},
        )


def test_a_key(model: Watched, tokenizer: Tokenizer) -> None:
    model.reset()
    with running(model, tokenizer, api_key="s3cret") as server:
        url = f"{server.address}/v1"
        assert complete(server).choices
        for key in ("wrong", "s3cre", "s3crets", "é"):
            headers = [(b"Authorization", f"Bearer {key}".encode())]
            reply = server.http.get("/v1/models", headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        assert server.http.post("/v1/completions", content=b"{").status_code == 401
        assert server.http.get("/health").status_code == 200
