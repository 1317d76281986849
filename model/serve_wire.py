"""What goes over the wire: OpenAI's requests as far as they are supported, its answers, its errors.

A field that would change the answer in a way that is not supported is refused by name; one that asks for what happens
anyway, or that only labels the request, is taken.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.decode import Generation

LABELS = {
    *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "user"),
}
"""Fields that do not change what is answered."""
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "none",
    "functions": [],
    "logit_bias": {},
    "logprobs": False,
    "modalities": ["text"],
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
"""Fields that are taken with this value, or null, alone."""


class ApiError(Exception):
    """A request that is not answered."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        # Lone surrogates, which JSON can smuggle in, cannot be sent back.
        readable = message.encode("utf-8", "backslashreplace").decode()
        self.body = {"error": {"message": readable, "type": type, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def _without_null(fields: Any) -> Any:
    """Null means the same as leaving a field out."""
    return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool = False
    """Taken, and not done."""


class _Request(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: str | list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, neutral in NEUTRAL.items():
            value = fields.get(name)
            # An integer 0 is no False: it asks for the probabilities of the tokens themselves.
            same = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            if value is not None and not same:
                raise ApiError(
                    400, f"{name}={value!r:.80} is not supported; leave it out, or {neutral!r}", param=name
                )
        return _without_null({k: v for k, v in fields.items() if k not in LABELS and k not in NEUTRAL})

    @property
    def stops(self) -> list[str]:
        """Raises ApiError for more than four, or an empty one."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > 4 or "" in stops:
            raise ApiError(400, f"stop must be up to 4 texts, none empty; it is {stops!r:.80}", param="stop")
        return stops

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """POST /v1/completions. The prompt is one text, or the token ids of one."""

    prompt: str | list[int] | list[str] | list[list[int]]

    @property
    def one_prompt(self) -> str | list[int]:
        """Raises ApiError for several prompts, or none."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return self.prompt  # type: ignore[return-value]
        if len(self.prompt) != 1:
            raise ApiError(
                400,
                f"prompt must be one prompt, not {len(self.prompt)}: send one request for each",
                param="prompt",
            )
        return self.prompt[0]  # type: ignore[return-value]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; a developer's counts as a system's."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    """A label: the template has no place for it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, fields: Any) -> Any:
        return _without_null(fields)  # answers have fields that are null, and come back in the next request

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        """Raises ApiError if both names of the limit are used, with different values."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ApiError(
                400,
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} contradict "
                "each other; give one",
                param="max_tokens",
            )
        return given.pop() if given else None


FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
"""OpenAI's word for why a text ends."""


class Answer:
    """One answer in the shape of its endpoint, at once or in chunks."""

    def __init__(self, model: str, chat: bool):
        self._chat = chat
        self._object = "chat.completion" if chat else "text_completion"
        self._fields = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        text = generation.text
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._chat
            else {"text": text}
        )
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": FINISH[generation.end_reason]}
        return {**self._fields, "object": self._object, "choices": [choice], "usage": usage(generation)}

    def chunk(self, text: str, first: bool = False, end_reason: str | None = None) -> dict[str, Any]:
        """A part of the text. The first one of a chat says whose it is, the last one why it ends."""
        finish = FINISH[end_reason] if end_reason else None
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        said = {"delta": delta} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return {**self._fields, "object": self._chunk_object, "choices": [choice]}

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """What comes last, if asked for."""
        return {**self._fields, "object": self._chunk_object, "choices": [], "usage": usage(generation)}

    @property
    def _chunk_object(self) -> str:
        return self._object + ".chunk" * self._chat


def usage(generation: Generation) -> dict[str, int]:
    """Tokens read and drawn, EOS included."""
    new = len(generation.tokens)
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": new,
        "total_tokens": generation.prompt_tokens + new,
    }
