"""A conversation in the terminal: `python -m model chat`.

Answers are shown as they are made. When a conversation outgrows the model's context, its oldest exchanges are left out
of what the model reads, and that is said.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from model.chat_template import ChatTemplate, ConversationError, Message
from model.decode import Answers, Generation, Sampling, Timing
from model.text import TextStream

HELP = "/reset begins anew, /quit or Ctrl-D ends; Ctrl-C stops an answer"


class Conversation:
    """What has been said, as far as it fits the context together with `room` tokens for the next answer."""

    def __init__(self, template: ChatTemplate, context: int, room: int, system: str = ""):
        self._template = template
        self._limit = context - room
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []

    def ask(self, question: str) -> tuple[list[int], int]:
        """Token ids to answer the question from, and how many of the oldest exchanges had to go for them.

        Raises ConversationError, and forgets the question, if it does not fit even alone.
        """
        turns: list[Message] = [*self._turns, {"role": "user", "content": question}]
        kept, prompt = turns, self._template.prompt([*self._system, *turns])
        while len(prompt) > self._limit and len(kept) > 1:
            kept = kept[2:]
            prompt = self._template.prompt([*self._system, *kept])
        if len(prompt) > self._limit:
            raise ConversationError(
                f"this message alone makes a prompt of {len(prompt)} tokens; at most {self._limit} leave room for "
                "an answer"
            )
        self._turns = kept
        return prompt, (len(turns) - len(kept)) // 2

    def answer(self, text: str) -> None:
        """Take the answer to the last question."""
        self._turns.append({"role": "assistant", "content": text})

    def reset(self) -> None:
        """Forget all but the system message."""
        self._turns = []


def chat(generate: Answers, conversation: Conversation, max_new_tokens: int, sampling: Sampling) -> None:
    """Read questions from stdin and answer them on stdout until either ends or /quit.

    Answer n of the conversation draws with seed + n.
    """
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401  arrow keys and history for input()

        print(HELP)
    answers = 0
    while (question := _read("> " if typed else "")) not in (None, "/quit"):
        if not question:
            continue
        if question == "/reset":
            conversation.reset()
            print("[the conversation begins anew]")
            continue
        if question.startswith("/"):
            print(f"[there is no command {question.split()[0]}: {HELP}]")
            continue
        try:
            prompt, dropped = conversation.ask(question)
        except ConversationError as error:
            print(f"[{error}]")
            continue
        if dropped:
            what = "exchange is" if dropped == 1 else f"{dropped} exchanges are"
            print(f"[the context is full: the oldest {what} left out]")
        how = replace(sampling, seed=sampling.seed + answers)
        conversation.answer(_answer(generate, prompt, max_new_tokens, how))
        answers += 1


def _read(prompt: str) -> str | None:
    """The next line; None at the end. Ctrl-C empties the line."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _answer(generate: Answers, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> str:
    """Show an answer while it is made, and what it took; returns it."""
    stream = TextStream()
    with _interrupts() as interrupted:

        def show(texts: list[str]) -> bool:
            print(stream.push(texts[0]), end="", flush=True)
            return bool(interrupted)

        (result,), timing = generate(
            [prompt], max_new_tokens=max_new_tokens, sampling=sampling, on_token=show
        )
    print(stream.finish(result.text))
    print(summary(result, timing), flush=True)
    return result.text


def summary(result: Generation, timing: Timing) -> str:
    """One line on how a generation ended, and how fast it was."""
    return (
        f"[{result.end_reason}: {result.prompt_tokens} prompt tokens, {len(result.tokens)} new, first after "
        f"{timing.seconds_to_first_token:.2f} s, then {timing.tokens_per_second:.1f} tokens/s]"
    )


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Within, Ctrl-C only adds to the list."""
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)
