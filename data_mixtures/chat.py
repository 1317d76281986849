"""The chat template: conversations as text and control tokens, for training, generation and export alike.

    <s><|system|>⏎{system}⏎<|user|>⏎{question}⏎<|assistant|>⏎{answer}</s><|user|>⏎…

The role markers are plain text, so any SentencePiece tokenizer can write them; BOS at the start and EOS after
each answer are the control ids. Each stretch of text between control ids is tokenised in one piece, exactly
as a tokenizer does that is handed the rendered template (`chat_template.jinja`, the same template for
exports). A marker ends with a newline, across which nothing merges, so the tokens of a prompt are a prefix of
the tokens of the conversation that continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np

from data_mixtures.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant"]
JINJA_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


class Message(TypedDict):
    """One message. The system message, if any, is the first; then user and assistant alternate."""

    role: Role
    content: str


class ConversationError(ValueError):
    """A conversation that the template cannot express; the message says which message and why."""


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a whole conversation, and its loss mask: 1 on the answers and the EOS after each, else 0.

    The conversation must end with an answer. Raises ConversationError.
    """
    _check(tokenizer, messages, last="assistant")
    ids, mask = [tokenizer.bos_id], [0]
    for prompt, answer in _exchanges(messages):
        exchange = tokenizer.encode(prompt + answer)
        ids += [*exchange, tokenizer.eos_id]
        mask += [*_after(tokenizer, exchange, prompt), 1]
    return ids, mask


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids to generate an answer from; the conversation must end with a question.

    They are a prefix of what `encode_conversation` gives for the conversation with the answer.
    Raises ConversationError.
    """
    _check(tokenizer, messages, last="user")
    ids = [tokenizer.bos_id]
    *earlier, (prompt, _) = _exchanges([*messages, {"role": "assistant", "content": ""}])
    for text, answer in earlier:
        ids += [*tokenizer.encode(text + answer), tokenizer.eos_id]
    return ids + tokenizer.encode(prompt)


def _exchanges(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """(text up to where the answer begins, answer) for each answer."""
    exchanges = []
    prompt = ""
    for message in messages:
        content = message["content"].strip()
        prompt += f"<|{message['role']}|>\n"
        if message["role"] == "assistant":
            exchanges.append((prompt, content))
            prompt = ""
        else:
            prompt += f"{content}\n"
    return exchanges


def _after(tokenizer: Tokenizer, ids: list[int], prompt: str) -> list[int]:
    """1 for the ids of a text that begin after its first part `prompt`, else 0."""
    sizes = tokenizer.bytes_per_token()[ids]
    begins = np.cumsum(sizes) - sizes
    boundary = len(prompt.encode()) + tokenizer.adds_prefix_space
    return (begins >= boundary).astype(int).tolist()


def _check(tokenizer: Tokenizer, messages: Sequence[Message], last: Role) -> None:
    if not tokenizer.newline_is_atomic:
        raise ConversationError(
            f"{tokenizer.path} has pieces that join a newline to other characters, so a prompt's tokens "
            "would depend on the answer; use a tokenizer whose newline is a token of its own"
        )
    turns = list(messages)
    for i, message in enumerate(turns):
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise ConversationError(f"message {i} ({message['role']}) is empty")
    if turns and turns[0]["role"] == "system":
        turns = turns[1:]
    for i, message in enumerate(turns):
        expected = "user" if i % 2 == 0 else "assistant"
        if message["role"] != expected:
            raise ConversationError(
                f"message {i + len(messages) - len(turns)} is by {message['role']!r}, expected "
                f"{expected!r}: user and assistant alternate after an optional system message"
            )
    if not turns or turns[-1]["role"] != last:
        raise ConversationError(f"the last message is not by {last!r}")
