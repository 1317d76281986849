"""From items to token sequences with the span that is scored, under two sets of rules.

                       dclm (llm-foundry 0.9; what CORE means)         nanochat
    between shots      one newline                                     two newlines
    shots              one Random(1234) stream through the file        file shuffled with Random(1337), then
                       in order (of the category, if by category)      Random(1234 + position) for each item
    white space        string fields stripped, context stripped on     context of language modelling stripped
                       the right, " " before the answer where the
                       tokenizer has " a" as one token
    tokens             shots, context and answer apart, then joined    the whole text; the span is what differs
                                                                       (schema: what is common at the end)
    start              the tokenizer's own default                     always BOS
    too long           context cut on the left to 2048 tokens          cut on the left to the model's longest

Both compare what follows a shared question (multiple choice) or a shared ending after different beginnings
(schema) by mean cross entropy per token; language modelling asks for the greedy token everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from eval.core_tasks import CHOICES, Item, Task, TaskData, categories

RulesName = Literal["dclm", "nanochat"]
DCLM_CONTEXT = 2048
SHOT_SEED = 1234
SHUFFLE_SEED = 1337


class TextEncoder(Protocol):
    """A tokenizer as scoring needs it."""

    longest: int
    """Tokens that the model can read at once."""
    bos_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone."""
        ...

    def encode_start(self, text: str) -> list[int]:
        """Ids of a text that begins a sequence: with what the tokenizer puts before it by default."""
        ...


@dataclass(frozen=True)
class Span:
    """A sequence whose tokens from `start` on are scored, each given all tokens before it; start ≥ 1."""

    tokens: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Prompt:
    """An item ready to score: one span per option, or one for language modelling, whose gold is None."""

    item: int
    spans: tuple[Span, ...]
    gold: int | None


class Rules(Protocol):
    name: RulesName

    def shots(self, data: TaskData, limit: int | None) -> dict[int, list[int]]:
        """The indices of the shots for each item that a run capped at `limit` may score."""
        ...

    def prompt(self, data: TaskData, item: int, shots: Sequence[int], encoder: TextEncoder) -> Prompt: ...


# --- shared


def question_and_answer(task: Task, item: Item) -> tuple[str, str]:
    """What a shot shows: its (right) context and its (right) answer."""
    if task.kind == "multiple_choice":
        return item["query"], item["choices"][item["gold"]]
    if task.kind == "schema":
        return item["context_options"][item["gold"]], item["continuation"]
    return item["context"], item["continuation"]


def _gold(task: Task, item: Item) -> int | None:
    return None if task.kind == "language_modeling" else item["gold"]


# --- DCLM


class DclmRules:
    name: RulesName = "dclm"

    def shots(self, data: TaskData, limit: int | None) -> dict[int, list[int]]:
        """Drawn for the whole file, whatever the cap, so that a capped run scores the same prompts."""
        del limit
        drawn: dict[int, list[int]] = {}
        for group in categories(data).values():
            stream = random.Random(SHOT_SEED)
            for position, index in enumerate(group):
                drawn[index] = [group[i] for i in self._draw(len(group), position, data.task.shots, stream)]
        return drawn

    @staticmethod
    def _draw(count: int, position: int, shots: int, stream: random.Random) -> list[int]:
        """`shots` positions other than `position`, in the order in which a Python set yields them.

        The reference keeps the sample in a set; its order is that of small integers in a hash table, which is
        part of the prompt.
        """
        if shots == 0:
            return []
        chosen = set(stream.sample(range(count), min(count - 1, shots)))
        if position in chosen:
            chosen.remove(position)
            if len(chosen) < count - 1:
                other = stream.choice(range(count))
                while other in chosen or other == position:
                    other = stream.choice(range(count))
                chosen.add(other)
        return list(chosen)

    def prompt(self, data: TaskData, item: int, shots: Sequence[int], encoder: TextEncoder) -> Prompt:
        task = data.task
        preamble = ""
        for shot in shots:
            question, answer = question_and_answer(task, _stripped(data.items[shot]))
            preamble += ("\n" if preamble else "") + question + task.delimiter + answer
        contexts, answers = self._texts(task, _stripped(data.items[item]), bool(preamble))
        space = " " if len(encoder.encode(" a")) == 1 else ""
        start = encoder.encode_start(preamble)
        spans = []
        for context, answer in zip(contexts, answers, strict=True):
            ending = encoder.encode(answer if answer.startswith(" ") else space + answer)
            beginning = start + encoder.encode(context)
            where = f"{task.name} item {item}"
            spans.append(self._cut(beginning, ending, min(DCLM_CONTEXT, encoder.longest), where))
        return Prompt(item, tuple(spans), _gold(task, data.items[item]))

    @staticmethod
    def _texts(task: Task, item: Item, after_shots: bool) -> tuple[list[str], list[str]]:
        """Context and answer of each option."""
        newline = "\n" if after_shots else ""
        if task.kind == "multiple_choice":
            context = (newline + item["query"] + task.delimiter).rstrip()
            return [context] * len(item["choices"]), item["choices"]
        if task.kind == "schema":
            # Without shots there is no delimiter: the space comes with the continuation.
            delimiter = task.delimiter.rstrip() if after_shots else ""
            contexts = [newline + option + delimiter for option in item["context_options"]]
            return contexts, [item["continuation"]] * len(contexts)
        return [(newline + item["context"] + task.delimiter).rstrip()], [item["continuation"]]

    @staticmethod
    def _cut(context: list[int], answer: list[int], longest: int, where: str) -> Span:
        keep = longest - len(answer)
        if keep < 1:
            raise ValueError(f"{where}: an answer of {len(answer)} tokens leaves no context within {longest}")
        context = context[-keep:]
        if not context:
            raise ValueError(f"{where}: nothing precedes the answer; the tokenizer has no start token")
        return Span((*context, *answer), len(context))


def _stripped(item: Item) -> Item:
    """The item with its string fields stripped; options, being lists, stay as they are."""
    return {key: value.strip() if isinstance(value, str) else value for key, value in item.items()}


# --- nanochat


class NanochatRules:
    name: RulesName = "nanochat"

    def shots(self, data: TaskData, limit: int | None) -> dict[int, list[int]]:
        """The first `limit` items after the shuffle, which are also all that shots are drawn from."""
        order = list(range(len(data.items)))
        random.Random(SHUFFLE_SEED).shuffle(order)
        order = order[:limit]
        drawn = {}
        for position, index in enumerate(order):
            stream = random.Random(SHOT_SEED + position)
            others = len(order) - 1
            picks = stream.sample(range(others), min(data.task.shots, others))
            drawn[index] = [order[p + (p >= position)] for p in picks]  # all positions but the item's own
        return drawn

    def prompt(self, data: TaskData, item: int, shots: Sequence[int], encoder: TextEncoder) -> Prompt:
        task, kind = data.task, data.task.kind
        preamble = ""
        for shot in shots:
            question, answer = question_and_answer(task, data.items[shot])
            question = question.strip() if kind == "language_modeling" else question
            preamble += question + task.delimiter + answer + "\n\n"
        this = data.items[item]
        if kind == "language_modeling":
            before = preamble + this["context"].strip() + task.delimiter
            sequences = [[encoder.bos_id, *encoder.encode(before + this["continuation"])]]
            without = [encoder.bos_id, *encoder.encode(before.strip())]
            starts = [_common(without, sequences[0])]
        else:
            pairs = [
                (this["query"], option) if kind == "multiple_choice" else (option, this["continuation"])
                for option in this[CHOICES[kind]]
            ]
            texts = [preamble + context + task.delimiter + answer for context, answer in pairs]
            sequences = [[encoder.bos_id, *encoder.encode(text)] for text in texts]
            if kind == "multiple_choice":
                starts = [_common(*sequences)] * len(sequences)
            else:
                shared = _common(*(sequence[::-1] for sequence in sequences))
                starts = [len(sequence) - shared for sequence in sequences]
        where = f"{task.name} item {item}"
        spans = [
            self._cut(s, start, encoder.longest, where) for s, start in zip(sequences, starts, strict=True)
        ]
        return Prompt(item, tuple(spans), _gold(task, this))

    @staticmethod
    def _cut(tokens: list[int], start: int, longest: int, where: str) -> Span:
        over = max(0, len(tokens) - longest)
        if start - over < 1:
            raise ValueError(
                f"{where}: an answer of {len(tokens) - start} tokens leaves no context in {longest}"
            )
        return Span(tuple(tokens[over:]), start - over)


def _common(*sequences: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    length = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length


RULES: dict[RulesName, Rules] = {"dclm": DclmRules(), "nanochat": NanochatRules()}
