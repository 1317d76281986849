"""`python -m model chat`: what the model reads, what is shown, and what keys and signals do."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data_mixtures.chat import JINJA_TEMPLATE, encode_prompt
from data_mixtures.tokenizer import Tokenizer as TrainingTokenizer
from model.chat import Conversation, chat
from model.chat_template import ChatTemplate, ConversationError
from model.cli import main
from model.decode import Generation, Sampling, Timing
from model.text import Tokenizer
from tests.unit.serve_fixtures import checkpoint_with_template, load


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_with_template(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def training(checkpoint: Path) -> TrainingTokenizer:
    return TrainingTokenizer(checkpoint / "tokenizer.model")


@pytest.fixture(scope="module")
def template(checkpoint: Path) -> ChatTemplate:
    return ChatTemplate(JINJA_TEMPLATE.read_text(), Tokenizer(checkpoint / "tokenizer.model"))


class Parrot:
    """A `generate` that answers "one ", "one two ", …; it notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling]] = []

    def __call__(
        self, prompts: list[list[int]], *, max_new_tokens: int, sampling: Sampling, on_token: Any
    ) -> Any:
        self.asked.append((prompts[0], sampling))
        text, reason = "", "length"
        for i, word in enumerate(["one ", "two ", "three"][:max_new_tokens]):
            text += word
            if i == 1 and len(self.asked) == 2:
                signal.raise_signal(signal.SIGINT)
            if on_token([text]):
                reason = "cancelled"
                break
        generation = Generation(prompt_tokens=len(prompts[0]), tokens=[5] * 3, text=text, end_reason=reason)
        return [generation], Timing(seconds_to_first_token=0.25, tokens_per_second=40)


def messages(*contents: str, system: str = "") -> list[Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return [{"role": "system", "content": system}] * bool(system) + turns


def test_turns_follow_each_other(
    template: ChatTemplate,
    training: TrainingTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ["the fox", "", "a dog", "/what is it", "and?", "/reset", "a new cat", "/quit", "unread"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    parrot = Parrot()
    before = signal.getsignal(signal.SIGINT)
    chat(parrot, Conversation(template, 512, 64, "be brief"), 3, Sampling(temperature=1.0, seed=7))
    assert signal.getsignal(signal.SIGINT) is before
    expected = [
        messages("the fox", system="be brief"),
        messages("the fox", "one two three", "a dog", system="be brief"),
        # Ctrl-C has stopped the second answer.
        messages("the fox", "one two three", "a dog", "one two", "and?", system="be brief"),
        messages("a new cat", system="be brief"),
    ]
    assert [prompt for prompt, _ in parrot.asked] == [encode_prompt(training, e) for e in expected]
    assert [how.seed for _, how in parrot.asked] == [7, 8, 9, 10]
    assert {how.temperature for _, how in parrot.asked} == {1.0}
    out = capsys.readouterr().out
    prompts = [len(prompt) for prompt, _ in parrot.asked]
    speed = "3 new, first after 0.25 s, then 40.0 tokens/s]\n"
    assert out == (
        f"one two three\n[length: {prompts[0]} prompt tokens, {speed}"
        f"one two \n[cancelled: {prompts[1]} prompt tokens, {speed}"
        "[there is no command /what: /reset begins anew, /quit or Ctrl-D ends; Ctrl-C stops an answer]\n"
        f"one two three\n[length: {prompts[2]} prompt tokens, {speed}"
        "[the conversation begins anew]\n"
        f"one two three\n[length: {prompts[3]} prompt tokens, {speed}"
    )


def test_the_oldest_exchanges_make_room(template: ChatTemplate, training: TrainingTokenizer) -> None:
    turns = ["the fox", "jumps", "a lazy dog", "sat", "the cat"]
    full = len(encode_prompt(training, messages(*turns, system="brief")))

    def talk(limit: int) -> tuple[list[int], int]:
        conversation = Conversation(template, limit + 10, 10, "brief")
        for question, answer in zip(turns[::2], turns[1::2], strict=False):
            conversation.ask(question)
            conversation.answer(answer)
        return conversation.ask(turns[-1])

    assert talk(full) == (encode_prompt(training, messages(*turns, system="brief")), 0)
    assert talk(full - 1) == (encode_prompt(training, messages(*turns[2:], system="brief")), 1)
    alone = encode_prompt(training, messages(turns[-1], system="brief"))
    assert talk(max(len(alone), len(encode_prompt(training, messages(turns[2], system="brief"))))) == (
        alone,
        1,
    )


def test_a_message_that_never_fits(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(template, 140, 20)
    conversation.ask("the fox")
    conversation.answer("jumps")
    with pytest.raises(ConversationError, match=r"of \d+ tokens; at most 120 leave room for an answer"):
        conversation.ask("fox " * 150)
    assert conversation.ask("and?")[1] == 0  # nothing is lost
    lines = ["fox " * 150, *["the fox"] * 6, "fox " * 45]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    parrot = Parrot()
    chat(parrot, Conversation(template, 140, 20), 1, Sampling())
    out = capsys.readouterr().out
    assert out.startswith("[this message alone makes a prompt of ")
    assert "[the context is full: the oldest exchange is left out]" in out
    assert re.search(r"\[the context is full: the oldest \d exchanges are left out\]", out)
    assert all(len(prompt) <= 120 for prompt, _ in parrot.asked)
    assert len(parrot.asked) == 7


def test_the_command(
    checkpoint: Path,
    training: TrainingTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick fox\n"))
    words = [
        "chat",
        f"checkpoint={checkpoint}",
        "max_new_tokens=12",
        "system=brief",
        "temperature=1",
        "seed=4",
    ]
    assert main(words) == 0
    prompt = encode_prompt(training, messages("the quick fox", system="brief"))
    sampling = Sampling(temperature=1, seed=4)
    (alone,), _ = load(checkpoint)([prompt], max_new_tokens=12, sampling=sampling)
    shown = re.escape(
        f"{alone.text}\n[{alone.end_reason}: {len(prompt)} prompt tokens, {len(alone.tokens)} new, "
    )
    assert re.fullmatch(
        shown + r"first after \d+\.\d\d s, then \d+\.\d tokens/s\]\n", capsys.readouterr().out
    )
    (checkpoint / "chat_template.jinja").rename(checkpoint / "aside")
    try:
        assert main(words) == 2
    finally:
        (checkpoint / "aside").rename(checkpoint / "chat_template.jinja")
    assert "has no chat_template.jinja; use python -m model generate" in capsys.readouterr().err


SLOW_TALKER = """
import signal, sys, time
from pathlib import Path
from model.chat import Conversation, chat
from model.chat_template import ChatTemplate
from model.decode import Generation, Sampling, Timing
from model.text import Tokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background

def generate(prompts, *, on_token, **how):
    for count in range(1, 600):
        time.sleep(0.05)
        if on_token(["la " * count]):
            break
    end = "cancelled" if count < 599 else "length"
    generation = Generation(prompt_tokens=1, tokens=[5] * count, text="la " * count, end_reason=end)
    return [generation], Timing(seconds_to_first_token=0.05, tokens_per_second=20)

folder = Path(sys.argv[1])
template = ChatTemplate.of_checkpoint(folder, Tokenizer(folder / "tokenizer.model"))
chat(generate, Conversation(template, 512, 64), 600, Sampling())
print("ended")
"""


def test_a_terminal(checkpoint: Path) -> None:
    """Ctrl-C stops an answer, and empties a line; Ctrl-D ends."""
    ours, theirs = pty.openpty()
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < end, f"{text!r} has not come: {seen!r}"
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 4096).decode()
        seen = seen.partition(text)[2]

    command = [sys.executable, "-c", SLOW_TALKER, str(checkpoint)]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        try:
            until("> ")
            os.write(ours, b"the fox\n")
            until("la la la")
            process.send_signal(signal.SIGINT)
            until("[cancelled: 1 prompt tokens")
            until("> ")
            os.write(ours, b"never sent")
            until("never sent")
            time.sleep(0.5)  # a signal between echoing and waiting again is heard at the next key only
            process.send_signal(signal.SIGINT)
            until("> ")
            os.write(ours, b"/reset\n")
            until("[the conversation begins anew]")
            until("> ")
            os.write(ours, b"\x04")
            until("ended")
            process.wait(20)
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
    assert process.returncode == 0
