from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser

from data_mixtures.chat import (
    JINJA_TEMPLATE,
    ConversationError,
    Message,
    Role,
    encode_conversation,
    encode_prompt,
)
from data_mixtures.identity import IDENTITY_FILE, identity_conversations
from data_mixtures.tokenizer import Tokenizer
from tests.unit.data_fixtures import llama_like_tokenizer, small_tokenizer

CONTENT = st.text(min_size=1, max_size=30).filter(str.strip)


def talk(*contents: str, system: str | None = None) -> list[Message]:
    """A conversation that begins with the user."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    roles: list[Role] = ["user", "assistant"]
    return messages + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="module", params=["ours", "llama"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return small_tokenizer(path) if request.param == "ours" else llama_like_tokenizer(path)


HAND_WRITTEN = [
    # (conversation, text before each answer, answers)
    (talk("Hi", "Hello."), ["<|user|>\nHi\n<|assistant|>\n"], ["Hello."]),
    (
        talk("What is 2+2?", "4", "And 3+3?", "It is 6.", system="Be brief."),
        [
            "<|system|>\nBe brief.\n<|user|>\nWhat is 2+2?\n<|assistant|>\n",
            "<|user|>\nAnd 3+3?\n<|assistant|>\n",
        ],
        ["4", "It is 6."],
    ),
    (
        talk("  code\n\nplease ", "\n```python\ndef f(x):\n    return x\n```\n"),
        ["<|user|>\ncode\n\nplease\n<|assistant|>\n"],
        ["```python\ndef f(x):\n    return x\n```"],
    ),
    (
        talk("é <s> \u2581", "日本 </s> \u2581 <|user|>"),
        ["<|user|>\né <s> \u2581\n<|assistant|>\n"],
        ["日本 </s> \u2581 <|user|>"],
    ),
]


@pytest.mark.parametrize(("messages", "prompts", "answers"), HAND_WRITTEN)
def test_hand_written_conversations_token_by_token(
    tokenizer: Tokenizer, messages: list[Message], prompts: list[str], answers: list[str]
) -> None:
    ids, mask = encode_conversation(tokenizer, messages)
    expected_ids, expected_mask = [tokenizer.bos_id], [0]
    for prompt, answer in zip(prompts, answers, strict=True):
        before = tokenizer.encode(prompt)
        whole = tokenizer.encode(prompt + answer)
        assert whole[: len(before)] == before
        expected_ids += [*whole, tokenizer.eos_id]
        expected_mask += [0] * len(before) + [1] * (len(whole) - len(before)) + [1]
    assert ids == expected_ids
    assert mask == expected_mask
    # what is trained on reads back as the answers, and nothing else
    trained, answer = [], []
    for i, m in zip(ids, mask, strict=True):
        if m:
            answer.append(i)
            if i == tokenizer.eos_id:
                trained.append(tokenizer.decode(answer))
                answer = []
    assert answer == []
    assert [text.lstrip() for text in trained] == answers


@settings(max_examples=150, deadline=None, derandomize=True)
@given(contents=st.lists(CONTENT, min_size=2, max_size=7), system=st.none() | CONTENT)
def test_prompts_are_prefixes_of_the_conversation(
    tokenizer: Tokenizer, contents: list[str], system: str | None
) -> None:
    contents = contents[: len(contents) // 2 * 2]
    messages = talk(*contents, system=system)
    ids, mask = encode_conversation(tokenizer, messages)
    assert len(ids) == len(mask)
    for n in range(1, len(contents), 2):
        prompt = encode_prompt(tokenizer, messages[: len(messages) - n])
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]  # the answer begins right there


class Generation(Extension):
    """`{% generation %}` as transformers has it: marks the answers, changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 wants a plain set)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pytest.mark.parametrize(("messages", "prompts", "answers"), HAND_WRITTEN)
def test_the_exported_template_renders_the_same_text(
    messages: list[Message], prompts: list[str], answers: list[str]
) -> None:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation])
    template = environment.from_string(JINJA_TEMPLATE.read_text())
    control = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    rendered = template.render(messages=messages, **control)
    assert rendered == "[BOS]" + "".join(f"{p}{a}[EOS]" for p, a in zip(prompts, answers, strict=True))
    prompt = template.render(messages=messages[:-1], add_generation_prompt=True, **control)
    assert rendered.startswith(prompt)
    assert prompt.endswith("<|assistant|>\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the last message is not by 'assistant'"),
        (talk("only a question"), "the last message is not by 'assistant'"),
        (talk("a", "b")[::-1], "message 0 is by 'assistant', expected 'user'"),
        (
            [*talk("a", "b"), {"role": "assistant", "content": "c"}],
            "message 2 is by 'assistant', expected 'user'",
        ),
        ([*talk("a"), {"role": "system", "content": "c"}], "message 1 is by 'system', expected 'assistant'"),
        (talk("a", " \n"), r"message 1 \(assistant\) is empty"),
        ([{"role": "user", "content": None}, *talk("a", "b")[1:]], r"message 0 \(user\) is empty"),
        ([{"role": "tool", "content": "x"}, *talk("a", "b")[1:]], "message 0 is by 'tool', expected 'user'"),
    ],
)
def test_conversations_that_do_not_fit_are_refused(
    tokenizer: Tokenizer, messages: list[Message], message: str
) -> None:
    with pytest.raises(ConversationError, match=message):
        encode_conversation(tokenizer, messages)


def test_a_prompt_ends_with_a_question(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConversationError, match="the last message is not by 'user'"):
        encode_prompt(tokenizer, talk("a", "b"))


def test_a_tokenizer_that_merges_newlines_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "newline_is_atomic", False)
    with pytest.raises(ConversationError, match="join a newline to other characters"):
        encode_conversation(tokenizer, talk("a", "b"))


def test_the_identity_set_says_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "identity.yaml"
    path.write_text(
        "name: Robin\nmaker: Nest\nfacts:\n  - {question: 'Can {name} fly?', answer: 'Yes, {maker} made me so.'}\n"
    )
    conversations = list(identity_conversations(path))
    texts = ["\n".join(m["content"] for m in messages) for messages in conversations]
    assert len(set(texts)) == len(texts) > 500
    assert any("Can Robin fly?" in text and "Yes, Nest made me so." in text for text in texts)
    assert not any("{" in text for text in texts)
    assert texts == ["\n".join(m["content"] for m in messages) for messages in identity_conversations(path)]


def test_the_shipped_identity_file_is_complete() -> None:
    assert any("Laneformer" in message["content"] for message in next(_identity()))


def _identity() -> Iterator[list[Message]]:
    return identity_conversations(IDENTITY_FILE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: A\nmaker: ''\nfacts: []\n", "maker is ''; it must be text"),
        ("name: A\nmaker: B\n", "facts is None; it must be a list"),
        ("name: A\nmaker: B\nfacts: [{question: q}]\n", r"facts\[0\] is .*must have question and answer"),
        (
            "name: A\nmaker: B\nfacts: [{question: q, answer: ''}]\n",
            r"facts\[0\]\.answer is ''; it must be text",
        ),
        (
            "name: A\nmaker: B\nfacts: [{question: q, answer: '{x}'}]\n",
            r"facts\[0\]\.answer: only \{name\} and",
        ),
        ("name: A\nmaker: B\nfacts: []\nage: 3\n", "unknown key 'age'"),
    ],
)
def test_incomplete_identity_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "identity.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"identity\.yaml: .*{message}"):
        next(identity_conversations(path))
