"""Token ids of a conversation, by the chat template that lies in the checkpoint.

The template is the one that the model was trained with: a run copies it into each checkpoint, as an import does from
the folder it reads. Its control tokens become ids, everything else is text: what a message says is never read as a
control token, even if it spells one. Each stretch of text between control tokens is tokenised in one piece, as in
training.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from model.text import Tokenizer

FILE = "chat_template.jinja"
Render = Callable[..., str]


class Message(TypedDict):
    """One message. The system message, if any, is the first; then user and assistant alternate."""

    role: Literal["system", "user", "assistant"]
    content: str


class ConversationError(ValueError):
    """A conversation that cannot be answered; the message says which of its messages is wrong and why."""


class ChatTemplate:
    """A template in Hugging Face's Jinja dialect, for one tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Control tokens are rendered as marks that nobody who writes messages can know.
        self._secret = secrets.token_hex(16)
        for written, i in tokenizer.control.items():
            source = source.replace(written, self._mark(i))
        self._render = compile_template(source)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint directory; None if it has none."""
        file = checkpoint / FILE
        if not file.is_file():
            return None
        try:
            return cls(file.read_text(encoding="utf-8"), tokenizer)
        except (jinja2.TemplateError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a chat template: {error}") from None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids to generate the answer to the last message from. Raises ConversationError."""
        check_messages(messages)
        text = self._render(
            messages=list(messages),
            bos_token=self._mark(self._tokenizer.bos_id),
            eos_token=self._mark(self._tokenizer.eos_id),
            add_generation_prompt=True,
        )
        ids: list[int] = []
        # Split at a captured group: texts at even places, the ids between them at odd ones.
        for place, part in enumerate(re.split(rf"<{self._secret}:(\d+)>", text)):
            ids += [int(part)] if place % 2 else self._tokenizer.encode(part)
        return ids

    def _mark(self, i: int | None) -> str:
        return "" if i is None else f"<{self._secret}:{i}>"


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ConversationError unless the messages are an optional system message, then user and assistant in turn,
    the user last, none empty but answers."""
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    begin = len(messages) - len(turns)
    for i, message in enumerate(turns):
        expected = "assistant" if i % 2 else "user"
        if message["role"] != expected:
            raise ConversationError(
                f"message {begin + i} is by {message['role']!r}, expected {expected!r}: user and assistant "
                "alternate after an optional system message"
            )
    if len(turns) % 2 == 0:
        raise ConversationError("the last message must be by 'user'")
    for i, message in enumerate(messages):
        if message["role"] != "assistant" and not message["content"].strip():
            raise ConversationError(f"message {i} ({message['role']}) is empty")


def compile_template(source: str) -> Render:
    """A function from a template's variables (messages, bos_token, eos_token, add_generation_prompt) to its text.

    Raises jinja2.TemplateError; the function raises ConversationError where the template refuses a conversation.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    template = environment.from_string(source)

    def render(**variables: Any) -> str:
        try:
            return template.render(**variables)
        except jinja2.TemplateError as error:
            raise ConversationError(f"the chat template cannot express the conversation: {error}") from None

    return render


class _Generation(Extension):
    """{% generation %}…{% endgeneration %}, which only marks what to train on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise ConversationError(f"the chat template refuses the conversation: {message}")
