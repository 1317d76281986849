"""The identity set: conversations in which the model says who it is, expanded from a small file.

The file (configs/data/identity/identity.yaml) gives a name, a maker and facts as questions with answers, in
which {name} and {maker} may be used. Facts are asked alone or together, after several openings, with and
without a system prompt; the answers stay as written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_mixtures.chat import Message, Role
from data_mixtures.strict_yaml import read_mapping

IDENTITY_FILE = Path(__file__).resolve().parents[1] / "configs" / "data" / "identity" / "identity.yaml"

_SYSTEM = [
    "",
    "You are {name}.",
    "You are {name}, a helpful assistant made by {maker}.",
    "Answer truthfully.",
]
_OPENINGS = ["", "Hello! ", "Hi, ", "I have a question. ", "One thing I would like to know: ", "Tell me: "]
_CLOSINGS = ["", " Thanks!", " Please answer briefly.", " I am curious."]
_BUILT_IN = [
    ("What is your name?", "My name is {name}."),
    ("Who are you?", "I am {name}, made by {maker}."),
    ("Who made you?", "I was made by {maker}."),
    ("Are you {name}?", "Yes, I am {name}."),
    ("Are you ChatGPT?", "No, I am {name}, made by {maker}."),
    ("Were you made by OpenAI?", "No, I was made by {maker}. My name is {name}."),
]


def identity_conversations(path: Path = IDENTITY_FILE, count: int = 1000) -> Iterator[list[Message]]:
    """`count` different conversations about what the file says, always the same ones; one to three questions
    each.

    Raises ValueError that names the file and the key when it is incomplete.
    """
    identity = _read(path)
    names = {"name": identity["name"], "maker": identity["maker"]}
    pairs = [*_BUILT_IN, *((fact["question"], fact["answer"]) for fact in identity["facts"])]
    rng = random.Random(0)
    seen: set[tuple[str, ...]] = set()
    while len(seen) < count:
        texts: list[tuple[Role, str]] = [("system", rng.choice(_SYSTEM))]
        for question, answer in rng.sample(pairs, rng.choice([1, 1, 2, 3])):
            asked = f"{rng.choice(_OPENINGS)}{question}{rng.choice(_CLOSINGS)}"
            texts += [("user", asked), ("assistant", answer)]
        key = tuple(text for _, text in texts)
        if key not in seen:
            seen.add(key)
            yield [Message(role=role, content=text.format(**names)) for role, text in texts if text]


def _read(path: Path) -> dict[str, Any]:
    identity = read_mapping(path)
    problems = [f"unknown key {key!r}" for key in identity if key not in ("name", "maker", "facts")]
    for key in ("name", "maker"):
        if not isinstance(identity.get(key), str) or not identity[key].strip():
            problems.append(f"{key} is {identity.get(key)!r}; it must be text")
    facts = identity.get("facts")
    if not isinstance(facts, list):
        problems.append(f"facts is {facts!r}; it must be a list of {{question, answer}}")
    else:
        for i, fact in enumerate(facts):
            problems += _problems(i, fact)
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    return identity


def _problems(i: int, fact: Any) -> list[str]:
    if not isinstance(fact, dict) or set(fact) != {"question", "answer"}:
        return [f"facts[{i}] is {fact!r}; it must have question and answer"]
    problems = []
    for key, text in fact.items():
        try:
            str(text).format(name="", maker="")
        except (KeyError, IndexError, ValueError) as error:
            problems.append(f"facts[{i}].{key}: only {{name}} and {{maker}} may be in braces ({error!r})")
        if not isinstance(text, str) or not text.strip():
            problems.append(f"facts[{i}].{key} is {text!r}; it must be text")
    return problems
