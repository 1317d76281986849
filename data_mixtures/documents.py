"""Rows to documents: the rules by which text is taken, cut or left out, each counted by its name.

    null                 the field is missing or null
    not_text             the field is of another type
    empty                nothing but whitespace
    invalid_utf8         bytes that are no UTF-8, or half a surrogate pair in a JSON string
    duplicate_id         the id came before in the same unit (needs an `id` column)
    contaminated         holds a benchmark item
    bad_conversation     messages that the chat template cannot express
    too_long             a conversation whose first exchange alone is over the limit
    corrupt_line/_file   damaged input, when it is skipped

Taken all the same, and counted: `chunked`, a text over 1,000,000 characters, stored as several documents cut
at line ends; `cut_at_turn`, a conversation over the limit, kept up to the last exchange that fits.
Text is taken as it is otherwise: no trimming, no normalisation, control-token look-alikes stay text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_mixtures.chat import ConversationError, Message, encode_conversation
from data_mixtures.records import Row
from data_mixtures.sources import Source
from data_mixtures.tokenizer import Tokenizer

MAX_CHARACTERS = 1_000_000


class Dropped(Exception):
    """A row that gives no document; the reason is its only argument."""


@dataclass(frozen=True)
class Document:
    """A document before tokenisation. `id` names it in reports; `text` is what is hashed and decontaminated."""

    id: str
    text: str
    messages: tuple[Message, ...] | None = None


def document(source: Source, row: Row, seen: set[Any]) -> Document:
    """The document of a row. `seen` holds the ids of the unit so far. Raises Dropped."""
    if row.broken:
        raise Dropped(row.broken)
    columns = source.columns or {"text": "text"}
    identity = row.fields.get(columns["id"]) if "id" in columns else None
    if source.format == "text":
        found = Document(_name(identity, row), _text(row.fields.get(columns["text"])))
    else:
        messages = _messages(source, columns, row.fields)
        found = Document(_name(identity, row), "\n\n".join(m["content"] for m in messages), messages)
    try:
        found.text.encode()
    except UnicodeEncodeError:
        raise Dropped("invalid_utf8") from None
    if identity is not None:
        key = identity if isinstance(identity, str | int) else json.dumps(identity, default=str)
        if key in seen:
            raise Dropped("duplicate_id")
        seen.add(key)
    return found


def chunks(text: str, limit: int = MAX_CHARACTERS) -> Iterator[str]:
    """A text in pieces of at most `limit` characters, cut after a newline where the last tenth has one."""
    start = 0
    while len(text) - start > limit:
        newline = text.rfind("\n", start + limit - limit // 10, start + limit)
        end = newline + 1 if newline >= 0 else start + limit
        yield text[start:end]
        start = end
    yield text[start:]


def encode_limited(
    tokenizer: Tokenizer, messages: Sequence[Message], limit: int | None
) -> tuple[list[int], list[int], bool]:
    """Ids and loss mask of a conversation within `limit` tokens, and whether it had to be cut at a turn.

    Raises Dropped.
    """
    kept = list(messages)
    cut = False
    while True:
        try:
            ids, mask = encode_conversation(tokenizer, kept)
        except ConversationError:
            raise Dropped("bad_conversation") from None
        if limit is None or len(ids) <= limit:
            return ids, mask, cut
        kept, cut = kept[:-2], True
        if not any(message["role"] == "assistant" for message in kept):
            raise Dropped("too_long")


def _messages(source: Source, columns: Any, fields: dict[str, Any]) -> tuple[Message, ...]:
    if source.format == "messages":
        given = fields.get(columns["messages"])
        if given is None:
            raise Dropped("null")
        if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
            raise Dropped("not_text")
        messages = [_message(message.get("role"), message.get("content")) for message in given]
    else:
        turns = (("user", columns["prompt"]), ("assistant", columns["response"]))
        messages = [_message(role, fields.get(column)) for role, column in turns]
    system = fields.get(columns["system"]) if "system" in columns else None
    if isinstance(system, str) and system.strip():
        messages.insert(0, _message("system", system))
    # An empty system message says nothing; some sets have one everywhere.
    if messages and messages[0]["role"] == "system" and not messages[0]["content"].strip():
        del messages[0]
    if not messages or any(not message["content"].strip() for message in messages):
        raise Dropped("empty")
    # What follows the last answer (a question left open) cannot be learned from.
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return tuple(messages)


def _message(role: Any, content: Any) -> Message:
    if content is None or role is None:
        raise Dropped("null")
    if not isinstance(content, str):
        raise Dropped("not_text")
    return {"role": role, "content": content}


def _text(value: Any) -> str:
    if value is None:
        raise Dropped("null")
    if not isinstance(value, str):
        raise Dropped("not_text")
    if not value.strip():
        raise Dropped("empty")
    return value


def _name(identity: Any, row: Row) -> str:
    return row.place if identity is None else str(identity)
