"""The HTTP API: OpenAI's completions and chat completions, the served model, health.

Nothing that a client sends is logged, and the key never is.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.chat_template import ChatTemplate
from model.decode import Generation, Sampling
from model.serve_queue import Ask, Job, OneAtATime, QueueFull
from model.serve_wire import Answer, ApiError, ChatRequest, CompletionRequest
from model.text import TextStream, Tokenizer

BODY_LIMIT = 1 << 20
"""Bytes of a request: far more than any context holds."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: a model's name, its tokenizer and template, and its sizes in tokens."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int
    vocab_size: int
    is_whole: Callable[[], bool] = lambda: True
    """Whether all processes that hold the model are there."""


def build_app(queue: OneAtATime, served: Served, api_key: str | None = None) -> FastAPI:
    """The ASGI application. With a key, everything under /v1 asks for it as a bearer token."""
    app = FastAPI(title="Laneformer", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, api_key=api_key)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)

    @app.get("/health")
    async def health() -> Response:
        if queue.failure or not served.is_whole():
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok", "busy": queue.busy, "waiting": queue.waiting})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_name(served, name)
        return _describe(served)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        _check_name(served, body.model)
        given = body.one_prompt
        prompt = (
            given if isinstance(given, list) else await _tokenize("prompt", served.tokenizer.prompt, given)
        )
        if not prompt or min(prompt) < 0 or max(prompt) >= served.vocab_size:
            raise ApiError(
                400,
                f"prompt must hold token ids, at least one, of 0..{served.vocab_size - 1}",
                param="prompt",
            )
        limit = 16 if body.max_tokens is None else body.max_tokens
        return await _answer(queue, served, request, body, "prompt", prompt, limit)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        _check_name(served, body.model)
        if served.template is None:
            raise ApiError(400, f"{served.name} has no chat template; use /v1/completions", param="model")
        roles = {"developer": "system"}
        messages = [{"role": roles.get(m.role, m.role), "content": m.text} for m in body.messages]
        prompt = await _tokenize("messages", served.template.prompt, messages)
        return await _answer(queue, served, request, body, "messages", prompt, body.limit or served.context)

    return app


class Gate:
    """What is checked before and while a request is read: the key, and the size of its body."""

    def __init__(self, app: ASGIApp, api_key: str | None):
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if (
            self.expected
            and scope["path"].startswith("/v1/")
            and not hmac.compare_digest(given, self.expected)
        ):
            refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await refusal.response()(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > BODY_LIMIT:
                raise HTTPException(413)
            return message

        await self.app(scope, receive_limited, send)


def _describe(served: Served) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": 0, "owned_by": "local"}


def _check_name(served: Served, name: str) -> None:
    if name != served.name:
        raise ApiError(
            404,
            f"the model {name!r:.200} is not served here; {served.name!r} is",
            param="model",
            code="model_not_found",
        )


async def _tokenize(param: str, encode: Callable[[Any], list[int]], text: Any) -> list[int]:
    """Encode in a thread, so that a long text does not keep others waiting. Raises ApiError."""
    try:
        return await asyncio.to_thread(encode, text)
    except ValueError as error:
        raise ApiError(400, str(error), param=param) from None


async def _answer(
    queue: OneAtATime,
    served: Served,
    request: Request,
    body: CompletionRequest | ChatRequest,
    param: str,
    prompt: list[int],
    max_new_tokens: int,
) -> Response:
    """Generate after the prompt, whose tokens come from the request's field `param`."""
    if len(prompt) > served.context:
        raise ApiError(
            400,
            f"{param} has {len(prompt)} tokens, the model's context {served.context}; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    ask = Ask(
        prompt=prompt,
        max_new_tokens=min(max_new_tokens, served.context),
        sampling=Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbelow(2**62) if body.seed is None else body.seed,
        ),
        stops=body.stops,
    )
    try:
        job = queue.submit(ask)
    except QueueFull as full:
        headers = {"Retry-After": str(full.retry_seconds)}
        raise ApiError(429, str(full), type="rate_limit_error", code="queue_full", headers=headers) from None
    answer = Answer(served.name, chat=isinstance(body, ChatRequest))
    if body.stream:
        return _EventStream(job, _events(job, answer, body.with_usage))
    try:
        return JSONResponse(answer.whole(await _unless_gone(request, job)))
    finally:
        job.cancel()


async def _unless_gone(request: Request, job: Job) -> Generation:
    """The job's result; cancels the job if the client hangs up before."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await _result(job)
    finally:
        watcher.cancel()


async def _result(job: Job) -> Generation:
    """The job's result. Raises ApiError, also for a job that was cancelled."""
    try:
        generation = await job.result()
        if generation.end_reason != "cancelled":
            return generation
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    except asyncio.CancelledError:
        if not job.future.cancelled():  # it is this request that is cancelled, not the job
            raise
    except Exception:
        raise ApiError(500, "the model failed; the server ends", type="server_error") from None
    raise ApiError(503, "the request is cancelled: the server ends", type="server_error", code="server_ends")


async def _events(job: Job, answer: Answer, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events: chunks of text as it grows, or an error."""
    stream = TextStream(job.ask.stops)
    first = True
    try:
        async for text in job.texts():
            part = stream.push(text)
            if part or first:
                yield _event(answer.chunk(part, first=first))
                first = False
        generation = await _result(job)
        yield _event(answer.chunk(stream.finish(generation.text), first=first))
        yield _event(answer.chunk("", end_reason=generation.end_reason))
        if with_usage:
            yield _event(answer.usage_chunk(generation))
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _EventStream(StreamingResponse):
    """Cancels its job however it ends: told to the end, or because the client has hung up."""

    def __init__(self, job: Job, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_invalid(request: Request, error: Exception) -> Response:
    """What pydantic found wrong, in one message; the field it is about, if it is one."""
    assert isinstance(error, RequestValidationError)
    if "json" not in request.headers.get("content-type", "").lower():
        return ApiError(400, "send JSON, and say so: Content-Type: application/json").response()
    problems, fields = [], []
    for problem in error.errors():
        place = [str(step) for step in problem["loc"] if step != "body"]
        said = problem["msg"]
        if problem["type"] == "json_invalid":
            place, said = [], f"the body is not JSON: {problem['ctx']['error']}"
        elif problem["type"] == "extra_forbidden":
            said = "unknown, or not supported"
        fields += place[:1]
        problems.append(": ".join([*[".".join(place)] * bool(place), said]))
    param = fields[0] if len({*fields}) == 1 else None
    return ApiError(400, "; ".join(dict.fromkeys(problems)), param=param).response()


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 413:
        message = f"the request is larger than {BODY_LIMIT:,} bytes"
        return ApiError(413, message, code="request_too_large").response()
    headers = dict(error.headers) if error.headers else None
    return ApiError(error.status_code, str(error.detail), headers=headers).response()


async def _on_failure(_: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed", type="server_error").response()
