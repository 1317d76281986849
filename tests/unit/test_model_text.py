"""Token ids equal those of training, and text is shown as it grows without ever being taken back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.tokenizer import Tokenizer as TrainingTokenizer
from model.text import TextStream, Tokenizer
from tests.unit.data_fixtures import llama_like_tokenizer, small_tokenizer


@pytest.fixture(scope="module", params=["ours", "llama-like"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingTokenizer, Tokenizer]:
    make = small_tokenizer if request.param == "ours" else llama_like_tokenizer
    training = make(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")
    return training, Tokenizer(training.path)


TEXTS = st.text(st.sampled_from("ab \u2581\n\t<s>é日\U0001f600\x00\x01\u0301"), max_size=20)


@settings(deadline=None, max_examples=300)
@given(text=st.one_of(TEXTS, st.text(max_size=30)))
def test_ids_are_those_of_training(pair: tuple[TrainingTokenizer, Tokenizer], text: str) -> None:
    training, tokenizer = pair
    assert tokenizer.encode(text) == training.encode(text)
    assert tokenizer.prompt(text) == training.encode(text, bos=True)


@settings(deadline=None, max_examples=200)
@given(before=TEXTS, after=TEXTS)
def test_new_ids_read_as_the_text_they_add(
    pair: tuple[TrainingTokenizer, Tokenizer], before: str, after: str
) -> None:
    _, tokenizer = pair
    whole = tokenizer.prompt(before + after)
    prompt = tokenizer.prompt(before)
    if whole[: len(prompt)] == prompt:  # else a piece spans the boundary
        assert tokenizer.reader(prompt)(whole[len(prompt) :]) == after


def test_control_tokens_and_texts_that_are_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer(small_tokenizer(tmp_path / "t.model").path)
    assert tokenizer.control == {"<s>": 1, "</s>": 2}
    assert not {1, 2} & {*tokenizer.encode("<s> </s>")}
    assert tokenizer.reader([1])([2, 10**6]) == ""
    with pytest.raises(ValueError, match="not valid Unicode at character 1"):
        tokenizer.encode("a\ud800")
    (tmp_path / "no.model").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"no\.model is not a SentencePiece model"):
        Tokenizer(tmp_path / "no.model")


def test_growing_text_is_shown_once_and_never_taken_back(pair: tuple[TrainingTokenizer, Tokenizer]) -> None:
    """For any ids, among them bytes that make no character or make one late."""
    _, tokenizer = pair
    decode = tokenizer.reader(tokenizer.prompt("a"))
    draw = random.Random(5)
    late = 0
    for _ in range(300):
        ids = [
            draw.choice([draw.randint(3, 258), draw.randint(0, tokenizer.vocab_size - 1)]) for _ in range(12)
        ]
        ids += tokenizer.encode("日\U0001f600")[-7:]
        stream, shown = TextStream(), ""
        for count in range(1, len(ids) + 1):
            text = decode(ids[:count])
            shown += stream.push(text)
            assert text.startswith(shown)
            late += shown != text
        assert shown + stream.finish(decode(ids)) == decode(ids)
    assert late > 300


def test_whole_characters_are_shown_at_once() -> None:
    stream = TextStream()
    assert [stream.push(text) for text in ("a", "a\ufffd", "a\ufffd\ufffd", "a日", "a日b")] == [
        "a",
        "",
        "",
        "日",
        "b",
    ]
    # Four in a row can't all be the bytes of one character.
    assert stream.push("a日b\ufffd\ufffd\ufffd\ufffd") == "\ufffd"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(["END", "\n\n"])
    texts = ["so", "so E", "so EN", "so ENV", "so ENV\n", "so ENV\nE"]
    assert [stream.push(text) for text in texts] == ["so", " ", "", "ENV", "", "\n"]
    assert stream.finish("so ENV\n") == ""  # the stop has been cut off
    stream = TextStream(["aab"])
    assert stream.push("aaa") == "a"
    assert stream.finish("aaa") == "aa"


def test_new_text_continues_the_prompt_with_any_tokenizer(tmp_path: Path) -> None:
    """Also with one that normalises, and one that puts a space before a text and drops it when reading."""
    text = tmp_path / "text"
    text.write_text("the lane is the lane and the lane was a lane\n" * 20)
    for adds_space in (True, False):
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(tmp_path / "t"),
            vocab_size=290,
            model_type="bpe",
            byte_fallback=True,
            add_dummy_prefix=adds_space,
            hard_vocab_limit=False,
            minloglevel=9,
        )
        tokenizer = Tokenizer(tmp_path / "t.model")
        prompt, whole = tokenizer.prompt("the lane"), tokenizer.prompt("the lane was a lane")
        assert whole[: len(prompt)] == prompt
        assert tokenizer.reader(prompt)(whole[len(prompt) :]) == " was a lane"
        assert prompt[0] == 1
