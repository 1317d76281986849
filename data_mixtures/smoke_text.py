"""Generated text for the smoke run: problems with worked steps, and short conversations.

Each document is made from its own seed, so any of them can be made again alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from data_mixtures.chat import Message

REASONING_DOCUMENTS = 12_000
CONVERSATIONS = 2_500

_NAMES = ["Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivan", "June", "Kofi", "Lena"]
_THINGS = ["apples", "pencils", "books", "stamps", "marbles", "tickets", "eggs", "cards", "bolts", "candles"]
_FACTS = {
    "the capital of France": "Paris",
    "the capital of Japan": "Tokyo",
    "the capital of Kenya": "Nairobi",
    "the largest planet of the solar system": "Jupiter",
    "the chemical symbol of iron": "Fe",
    "the number of days in a leap year": "366",
    "the opposite of north": "south",
    "the boiling point of water at sea level in degrees Celsius": "100",
}
_FUNCTIONS = {
    "returns the square of a number": "def square(x):\n    return x * x",
    "returns the larger of two numbers": "def larger(a, b):\n    return a if a > b else b",
    "counts the vowels in a string": 'def vowels(text):\n    return sum(c in "aeiou" for c in text.lower())',
    "reverses a list": "def reverse(items):\n    return items[::-1]",
    "checks whether a number is even": "def is_even(n):\n    return n % 2 == 0",
    "returns the sum of the digits of a number": "def digit_sum(n):\n    return sum(int(d) for d in str(n))",
    "removes duplicates and keeps the order": "def unique(items):\n    return list(dict.fromkeys(items))",
    "returns the last element of a list": "def last(items):\n    return items[-1]",
}
_WORDS = ["lane", "model", "token", "batch", "phase", "layer", "tensor", "order", "river", "garden", "copper"]


def reasoning(count: int = REASONING_DOCUMENTS) -> Iterator[str]:
    """`count` problems with their solutions, step by step."""
    for i in range(count):
        rng = random.Random(f"reasoning {i}")
        yield rng.choice(_PROBLEMS)(rng)


def conversations(count: int = CONVERSATIONS) -> Iterator[list[Message]]:
    """`count` conversations of one to three exchanges, a quarter of them with a system prompt."""
    for i in range(count):
        rng = random.Random(f"conversation {i}")
        messages: list[Message] = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": "You are a helpful assistant. Answer briefly."})
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            question, answer = rng.choice(_EXCHANGES)(rng)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        yield messages


def _addition(rng: random.Random) -> str:
    a, b = rng.randint(10, 9999), rng.randint(10, 9999)
    lines = [f"Problem: compute {a} + {b}.", "Add digit by digit, from the right."]
    carry = 0
    for place in range(len(str(max(a, b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        carried = f" and the carry {carry}" if carry else ""
        lines.append(f"{x} plus {y}{carried} is {total}: write {total % 10}, carry {total // 10}.")
        carry = total // 10
    return "\n".join([*lines, f"Answer: {a + b}\n"])


def _multiplication(rng: random.Random) -> str:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    tens, ones = b // 10 * 10, b % 10
    return (
        f"Problem: compute {a} * {b}.\nSplit {b} into {tens} and {ones}.\n{a} * {tens} = {a * tens}\n"
        f"{a} * {ones} = {a * ones}\nThe sum is {a * tens} + {a * ones} = {a * b}.\nAnswer: {a * b}\n"
    )


def _division(rng: random.Random) -> str:
    b, q = rng.randint(3, 12), rng.randint(5, 60)
    r = rng.randrange(b)
    a = b * q + r
    return (
        f"Problem: divide {a} by {b} with remainder.\n{b} times {q} is {b * q}.\n{b} times {q + 1} is "
        f"{b * (q + 1)}, which is more than {a}.\n"
        f"So the quotient is {q}, and {a} - {b * q} = {r} remains.\n"
        f"Answer: {q} remainder {r}\n"
    )


def _equation(rng: random.Random) -> str:
    a, x, b = rng.randint(2, 12), rng.randint(-20, 20), rng.randint(1, 50)
    c = a * x + b
    return (
        f"Problem: solve {a}x + {b} = {c}.\nSubtract {b} from both sides: {a}x = {c - b}.\n"
        f"Divide both sides by {a}: x = {x}.\nCheck: {a} * {x} + {b} = {c}.\nAnswer: x = {x}\n"
    )


def _sequence(rng: random.Random) -> str:
    start, step = rng.randint(1, 40), rng.randint(2, 15)
    shown = [start + step * i for i in range(4)]
    return (
        f"Problem: continue the sequence {', '.join(map(str, shown))}.\n"
        f"Each number is {step} more than the one "
        f"before.\n{shown[-1]} + {step} = {shown[-1] + step}.\nAnswer: {shown[-1] + step}\n"
    )


def _shopping(rng: random.Random) -> str:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    n, price = rng.randint(2, 12), rng.randint(2, 9)
    paid = (n * price // 10 + 1) * 10
    return (
        f"Problem: {name} buys {n} {thing} at {price} coins each and pays with {paid} "
        f"coins. How much change does "
        f"{name} get?\nThe {thing} cost {n} * {price} = {n * price} coins.\n"
        f"The change is {paid} - {n * price} = "
        f"{paid - n * price} coins.\nAnswer: {paid - n * price}\n"
    )


def _sharing(rng: random.Random) -> str:
    a, b = rng.sample(_NAMES, 2)
    thing, x, y = rng.choice(_THINGS), rng.randint(5, 60), rng.randint(5, 60)
    given = rng.randint(1, 4)
    return (
        f"Problem: {a} has {x} {thing} and {b} has {y}. {a} gives {b} {given} {thing}. "
        f"How many more does {b} have "
        f"than {a}?\n{a} has {x} - {given} = {x - given} left.\n"
        f"{b} has {y} + {given} = {y + given} now.\n"
        f"The difference is {y + given} - {x - given} = {y + given - x + given}.\n"
        f"Answer: {y - x + 2 * given}\n"
    )


def _travel(rng: random.Random) -> str:
    speed, hours, more = rng.randint(3, 12) * 10, rng.randint(2, 6), rng.randint(5, 90)
    return (
        f"Problem: a train goes {speed} km per hour for {hours} hours and then {more} km "
        f"further. How far does it "
        f"go?\nIn {hours} hours it goes {speed} * {hours} = {speed * hours} km.\n"
        f"Together that is {speed * hours} + "
        f"{more} = {speed * hours + more} km.\nAnswer: {speed * hours + more} km\n"
    )


def _comparison(rng: random.Random) -> str:
    a, b, c = rng.sample(_NAMES, 3)
    x = rng.randint(5, 40)
    d, e = rng.randint(1, 9), rng.randint(1, 9)
    return (
        f"Problem: {a} is {x} years old. {b} is {d} years older than {a}, and {c} is {e} "
        f"years younger than {b}. "
        f"How old is {c}?\n{b} is {x} + {d} = {x + d} years old.\n"
        f"{c} is {x + d} - {e} = {x + d - e} years old.\n"
        f"Answer: {x + d - e}\n"
    )


_PROBLEMS: list[Callable[[random.Random], str]] = [
    *(_addition, _multiplication, _division, _equation, _sequence),
    *(_shopping, _sharing, _travel, _comparison),
]


def _ask_sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return rng.choice([f"What is {a} + {b}?", f"Add {a} and {b}."]), f"{a} + {b} = {a + b}"


def _ask_fact(rng: random.Random) -> tuple[str, str]:
    what, answer = rng.choice(list(_FACTS.items()))
    return rng.choice([f"What is {what}?", f"Tell me {what}."]), f"{what[0].upper()}{what[1:]} is {answer}."


def _ask_code(rng: random.Random) -> tuple[str, str]:
    what, answer = rng.choice(list(_FUNCTIONS.items()))
    question = rng.choice([f"Write a Python function that {what}.", f"I need Python code that {what}."])
    return question, f"```python\n{answer}\n```"


def _ask_words(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_WORDS, rng.randint(2, 4))
    listed = ", ".join(words)
    if rng.random() < 0.5:
        return f"Sort these words: {listed}", ", ".join(sorted(words))
    return f"Repeat these words in capital letters: {listed}", listed.upper()


_EXCHANGES: list[Callable[[random.Random], tuple[str, str]]] = [_ask_sum, _ask_fact, _ask_code, _ask_words]
