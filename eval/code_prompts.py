"""Prompts and stops of HumanEval+ and MBPP+, as evalplus 0.3.1 makes them for base and for chat models.

A base model continues the problem's text, and its continuation belongs behind that text. A chat model is asked
for a script and its answer is opened for it with a Python block; what it writes up to the closing fence is the
whole solution. In both cases evalplus' sanitizer then keeps the imports and what the function needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from model.chat_template import compile_template

Style = Literal["base", "chat"]
Render = Callable[[Sequence[dict[str, str]]], str]
"""Messages ({"role", "content"}, ending with an assistant's) → the text of the conversation."""

STOPS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(")
BASE_STOPS = {
    "humaneval": ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert "),
    "mbpp": ('\n"""', "\nassert"),
}
CHAT_STOPS = ("\n```\n",)
ASK = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
OPEN = (
    "Below is a Python script with a self-contained function that solves the problem and passes "
    "corresponding tests:"
)
HERE = "-[[]]-the-answer-goes-here-[[]]-"  # marks the place in the rendered conversation; never in a problem


def stops(style: Style, dataset: str) -> list[str]:
    """Where a continuation ends. `dataset` is evalplus' name: humaneval or mbpp."""
    return [*STOPS, *(BASE_STOPS[dataset] if style == "base" else CHAT_STOPS)]


def prompt(problem: str, style: Style, render: Render | None = None) -> str:
    """What the model continues. Chat needs the model's own template as `render`."""
    if style == "base":
        return problem.strip() + "\n"
    if render is None:
        raise ValueError("the chat style needs the model's chat template, and none was given; use style=base")
    text = render(
        [
            {"role": "user", "content": f"{ASK}\n```\n{problem.strip()}\n```\n"},
            {"role": "assistant", "content": f"{OPEN}\n```python\n{HERE}\n```\n"},
        ]
    )
    before, mark, _ = text.partition(HERE)
    if not mark:
        raise ValueError(
            "the chat template leaves out the assistant's message, whose beginning is the prompt"
        )
    return before


def solution(problem: str, continuation: str, style: Style, dataset: str) -> str:
    """The program that a continuation stands for: cut at the first stop, tabs as four spaces."""
    ends = [at for stop in stops(style, dataset) if (at := continuation.find(stop)) >= 0]
    answer = continuation[: min(ends, default=None)].replace("\t", "    ")
    return prompt(problem, style) + answer if style == "base" else answer


def chat_renderer(template: str, eos_token: str = "</s>", bos_token: str = "") -> Render:
    """`Render` for a chat template in Hugging Face's Jinja dialect (chat_template.jinja). BOS is left out of the
    text by default, for tokenizers that add it and do not read it."""
    compiled = compile_template(template)

    def render(messages: Sequence[dict[str, str]]) -> str:
        return compiled(
            messages=list(messages), bos_token=bos_token, eos_token=eos_token, add_generation_prompt=False
        )

    return render
