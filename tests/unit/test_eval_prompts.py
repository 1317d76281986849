"""Each rule that turns items into scored tokens, on items made by hand; expected texts are written out.

`^` stands for BOS. A scored span is shown as context|answer.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from eval.core_prompts import DclmRules, NanochatRules, Prompt
from eval.core_tasks import TaskData
from tests.unit.eval_fixtures import CharEncoder, SpaceEncoder, make_task

DCLM, NANOCHAT = DclmRules(), NanochatRules()
ANSWER = "\nAnswer: "


def shown(prompt: Prompt) -> list[str]:
    text = CharEncoder.text
    return [text(s.tokens[: s.start]) + "|" + text(s.tokens[s.start :]) for s in prompt.spans]


def multiple_choice(**changes: object) -> TaskData:
    items = [
        {"query": " Sky? \n", "choices": ["blue", "green"], "gold": 0},
        {"query": "Grass?", "choices": ["blue", "green "], "gold": 1},
        {"query": "Snow?", "choices": ["white", "wet"], "gold": 0},
    ]
    return make_task("multiple_choice", items, **changes)


def schema(**changes: object) -> TaskData:
    items = [
        {
            "context_options": ["The cup fell so the cup", "The cup fell so the table"],
            "continuation": " broke.",
            "gold": 0,
        },
        {
            "context_options": ["Tim paid Sue as Tim", "Tim paid Sue as Sue"],
            "continuation": "worked.",
            "gold": 1,
        },
    ]
    return make_task("schema", items, **changes)


def language(**changes: object) -> TaskData:
    items = [
        {"context": "1 2 3 ", "continuation": " 4", "category": "up"},
        {"context": " a b\n", "continuation": "c", "category": "letters"},
        {"context": "5 6", "continuation": "7", "category": "up"},
        {"context": "x y", "continuation": "z", "category": "letters"},
    ]
    return make_task("language_modeling", items, **changes)


# --- DCLM: texts


def test_multiple_choice_with_shots() -> None:
    prompt = DCLM.prompt(multiple_choice(delimiter=ANSWER), 2, [0, 1], SpaceEncoder())
    # One newline between shots; fields stripped (options are not: "green " keeps its space); the context loses
    # the delimiter's trailing space, which comes back at the answer.
    shots = "^Sky?\nAnswer: blue\nGrass?\nAnswer: green \nSnow?\nAnswer:"
    assert shown(prompt) == [shots + "| white", shots + "| wet"]
    assert prompt.gold == 0


def test_no_space_where_the_tokenizer_has_none() -> None:
    prompt = DCLM.prompt(multiple_choice(), 2, [], CharEncoder())
    assert shown(prompt) == ["^Snow?|white", "^Snow?|wet"]


@pytest.mark.parametrize("delimiter", [" ", " - "])
def test_schema_scores_the_shared_ending(delimiter: str) -> None:
    prompt = DCLM.prompt(schema(delimiter=delimiter), 0, [], SpaceEncoder())  # no delimiter without shots
    assert shown(prompt) == ["^The cup fell so the cup| broke.", "^The cup fell so the table| broke."]


def test_schema_with_shots() -> None:
    prompt = DCLM.prompt(schema(delimiter=" - "), 0, [1], SpaceEncoder())
    shot = "^Tim paid Sue as Sue - worked.\n"
    # After shots the delimiter, stripped on the right, stands between context and ending.
    assert shown(prompt) == [
        shot + "The cup fell so the cup -| broke.",
        shot + "The cup fell so the table -| broke.",
    ]


def test_language_modelling() -> None:
    prompt = DCLM.prompt(language(), 1, [0], SpaceEncoder())
    assert shown(prompt) == ["^1 2 3 4\na b| c"]
    assert prompt.gold is None


def test_parts_are_tokenised_apart() -> None:
    class Pairs(CharEncoder):
        """Two characters a token: joining before or after tokenising differs."""

        def encode(self, text: str) -> list[int]:
            return [int.from_bytes(text[i : i + 2].encode(), "big") for i in range(0, len(text), 2)]

    encoder = Pairs()
    (span,) = DCLM.prompt(language(), 2, [3], encoder).spans
    assert list(span.tokens) == [1, *encoder.encode("x y z"), *encoder.encode("\n5 6"), *encoder.encode(" 7")]
    assert span.start == len(span.tokens) - 1


def test_start_is_the_tokenizers_own() -> None:
    class NoStart(CharEncoder):
        def encode_start(self, text: str) -> list[int]:
            return self.encode(text)

    assert shown(DCLM.prompt(language(), 2, [], NoStart())) == ["5 6|7"]
    assert shown(NANOCHAT.prompt(language(), 2, [], NoStart())) == ["^5 6| 7"]


def test_cut_on_the_left_to_2048() -> None:
    items = [{"context": "a" * 3000 + "b", "continuation": "cde"}]
    (span,) = DCLM.prompt(make_task("language_modeling", items), 0, [], CharEncoder(4096)).spans
    assert (len(span.tokens), span.start) == (2048, 2045)
    assert CharEncoder.text(span.tokens[-4:]) == "bcde"


def test_cut_to_the_model_when_it_reads_less() -> None:
    items = [{"context": "abcdefgh", "continuation": "ij"}]
    assert shown(DCLM.prompt(make_task("language_modeling", items), 0, [], CharEncoder(5))) == ["fgh|ij"]
    assert shown(NANOCHAT.prompt(make_task("language_modeling", items), 0, [], CharEncoder(5))) == ["gh| ij"]


@pytest.mark.parametrize("rules", [DCLM, NANOCHAT])
def test_an_answer_that_leaves_no_context_is_refused(rules: DclmRules | NanochatRules) -> None:
    data = make_task("language_modeling", [{"context": "abc", "continuation": "defgh"}])
    with pytest.raises(ValueError, match=r"hand_made item 0: an answer of [56] tokens"):
        rules.prompt(data, 0, [], CharEncoder(5))


# --- DCLM: which shots


def test_one_stream_through_the_file() -> None:
    data = make_task(
        "language_modeling", [{"context": str(i), "continuation": "x"} for i in range(30)], shots=4
    )
    drawn = DCLM.shots(data, None)
    stream = random.Random(1234)
    for item in range(30):
        first = stream.sample(range(30), 4)
        if item in first:
            rest = [i for i in first if i != item]
            while (other := stream.randrange(30)) in rest or other == item:
                pass
            first = [*rest, other]
        assert sorted(drawn[item]) == sorted(first)
    assert DCLM.shots(data, 10) == drawn, "a cap must not change the prompts"


class Dealt(random.Random):
    """A stream that deals what it is given."""

    def __init__(self, sample: list[int], choices: list[int]):
        super().__init__()
        self.dealt, self.later = sample, choices

    def sample(self, population: Any, k: int) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dealt

    def choice(self, seq: Any) -> Any:
        return self.later.pop(0)


def test_shots_come_in_the_order_of_a_set() -> None:
    # A set of four integers has eight slots: 3 and 5 lie on slots 3 and 5, 16 on slot 0, and 8, which would be
    # there too, on the next.
    assert DCLM._draw(40, 39, 4, Dealt([16, 3, 8, 5], [])) == [16, 8, 3, 5]
    # The item itself, 3, makes room for a new draw; 5, which is there already, and 3 are drawn again.
    assert DCLM._draw(40, 3, 4, Dealt([16, 3, 8, 5], [5, 3, 11])) == [16, 8, 11, 5]


def test_fewer_items_than_shots() -> None:
    drawn = DCLM.shots(language(shots=10), None)
    assert {item: sorted(shots) for item, shots in drawn.items()} == {
        0: [1, 2, 3],
        1: [0, 2, 3],
        2: [0, 1, 3],
        3: [0, 1, 2],
    }


def test_shots_within_the_category() -> None:
    items = [{"context": str(i), "continuation": "x", "category": "ab"[i % 2]} for i in range(40)]
    drawn = DCLM.shots(make_task("language_modeling", items, shots=3, by_category=True), None)
    assert all(shot % 2 == item % 2 for item, shots in drawn.items() for shot in shots)
    # Each category has a stream of its own from the same seed: the same positions are drawn in both.
    assert [[shot // 2 for shot in drawn[2 * i]] for i in range(20)] == [
        [shot // 2 for shot in drawn[2 * i + 1]] for i in range(20)
    ]


@pytest.mark.parametrize("rules", [DCLM, NANOCHAT])
def test_never_its_own_shot(rules: DclmRules | NanochatRules) -> None:
    data = make_task(
        "language_modeling", [{"context": str(i), "continuation": "x"} for i in range(12)], shots=10
    )
    for item, shots in rules.shots(data, None).items():
        assert item not in shots
        assert len(set(shots)) == 10


# --- nanochat


def test_nanochat_multiple_choice() -> None:
    prompt = NANOCHAT.prompt(multiple_choice(delimiter=ANSWER), 2, [0], CharEncoder())
    # Two newlines, nothing stripped, and the answers' common "w" belongs to the context.
    context = "^ Sky? \n\nAnswer: blue\n\nSnow?\nAnswer: w"
    assert shown(prompt) == [context + "|hite", context + "|et"]


def test_nanochat_schema() -> None:
    prompt = NANOCHAT.prompt(schema(), 0, [1], CharEncoder())
    shot = "^Tim paid Sue as Sue worked.\n\nThe cup fell so the "
    assert shown(prompt) == [shot + "cup|  broke.", shot + "table|  broke."]


def test_nanochat_language_modelling() -> None:
    prompt = NANOCHAT.prompt(language(), 1, [0], CharEncoder())
    # Contexts are trimmed, answers are not; the scored span begins after the trimmed prompt.
    assert shown(prompt) == ["^1 2 3  4\n\na b| c"]


def test_nanochat_shots() -> None:
    count = 25
    data = make_task(
        "language_modeling", [{"context": str(i), "continuation": "x"} for i in range(count)], shots=4
    )
    order = list(range(count))
    random.Random(1337).shuffle(order)
    for limit in (None, 10):
        kept = order[:limit]
        drawn = NANOCHAT.shots(data, limit)
        assert list(drawn) == kept
        for position, item in enumerate(kept):
            others = [i for i in range(len(kept)) if i != position]
            expected = [kept[i] for i in random.Random(1234 + position).sample(others, 4)]
            assert drawn[item] == expected
