"""tokenizer.json against SentencePiece: 5 MB of real text, text made to break it, and models it must refuse."""

from __future__ import annotations

import dataclasses
import io
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as Twin

from data_mixtures.tokenizer import Tokenizer, train_tokenizer
from model.hf_tokenizer import build_twin, check_twin, merges, read_pieces

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def library_text(size: int) -> list[str]:
    """Python files of the standard library, in a fixed order, of at least so many bytes."""
    texts, total = [], 0
    for file in sorted([*STDLIB.glob("*.py"), *STDLIB.glob("[a-z]*/*.py")]):
        if "site-packages" in file.parts:
            continue
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        total += len(texts[-1].encode())
        if total >= size:
            return texts
    pytest.skip(f"this Python's standard library has only {total} bytes of source")


@pytest.fixture(scope="module", params=["ours", "prefix_space"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Twin]:
    """A tokenizer of our kind, and one that puts a space before each text as Llama 2's does; and their twins."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    texts = library_text(400_000)
    if request.param == "ours":
        train_tokenizer(texts, file, 2000)
    else:
        file.write_bytes(trained(texts))
    twin = Twin.from_str(build_twin(read_pieces(file)).to_str())
    twin.encode_special_tokens = True
    return Tokenizer(file), twin


def trained(texts: list[str], **options: object) -> bytes:
    """A SentencePiece model with Llama 2's settings, but for the options."""
    settings = {
        "model_type": "bpe",
        "vocab_size": 1500,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "num_threads": 1,
        "minloglevel": 2,
    }
    lines = [line[:2000] for text in texts for line in text.split("\n")]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines), model_writer=model, **{**settings, **options}
    )
    return model.getvalue()


def ids_of(twin: Twin, text: str) -> list[int]:
    return twin.encode(text, add_special_tokens=False).ids


def test_five_megabytes_of_real_text(pair: tuple[Tokenizer, Twin]) -> None:
    ours, twin = pair
    texts = library_text(5_000_000)
    for text, expected in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids_of(twin, text) == expected
        assert twin.decode(expected) == text


RANDOM: dict[str, Callable[[random.Random, list[str]], str]] = {
    "runs": lambda draw, _: "".join(draw.choice(" e-=#ax\n") * draw.randint(1, 40) for _ in range(20)),
    "two characters": lambda draw, pieces: "".join(draw.choices(draw.sample(pieces, 2), k=60)),
    "pieces": lambda draw, pieces: "".join(draw.choices(pieces, k=80)),
    "unicode": lambda draw, _: "".join(
        chr(
            draw.choice(
                [draw.randint(0, 127), draw.randint(128, 0xD7FF), draw.randint(0xE000, 0x10FFFF), 0x2581]
            )
        )
        for _ in range(60)
    ),
    "control": lambda draw, _: "".join(
        draw.choices(
            ["<s>", "</s>", "<unk>", "<0x0A>", "\u2581", " ", "\n", "\r\n", "\t", "<|user|>", "a"], k=30
        )
    ),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_text_made_to_break_it(pair: tuple[Tokenizer, Twin], kind: str) -> None:
    ours, twin = pair
    draw = random.Random(kind)
    pieces = [piece for piece in read_pieces(ours.path).scores if kind == "pieces" or len(piece) == 1]
    for _ in range(300):
        text = RANDOM[kind](draw, pieces)
        expected = ours.encode(text)
        assert ids_of(twin, text) == expected, repr(text)
        assert twin.decode(expected, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "\u2581", "\u2581 a", " \u2581", "<s>", "a</s>b", "\x00", "\ufffd"]
)
def test_short_text(pair: tuple[Tokenizer, Twin], text: str) -> None:
    ours, twin = pair
    assert ids_of(twin, text) == ours.encode(text)


def test_control_tokens_are_recognised_by_default(pair: tuple[Tokenizer, Twin]) -> None:
    ours, _ = pair
    twin = build_twin(read_pieces(ours.path))
    expected = [ours.bos_id, *ours.encode("a b"), ours.eos_id, *ours.encode("c")]
    assert ids_of(twin, "<s>a b</s>c") == expected
    assert twin.encode("a b").ids == [ours.bos_id, *ours.encode("a b")]
    assert twin.decode(expected) == ours.decode(expected)


def test_pairs_that_make_one_piece_merge_leftmost() -> None:
    scores = {"a": 0.0, "aa": -1.0, "aaa": -2.0, "b": 0.0, "ab": -0.5}
    assert merges(scores) == [("a", "b"), ("a", "a"), ("aa", "a"), ("a", "aa")]


def test_a_wrong_twin_is_noticed(pair: tuple[Tokenizer, Twin]) -> None:
    ours, twin = pair
    pieces = read_pieces(ours.path)
    backwards = dataclasses.replace(pieces, scores={piece: -score for piece, score in pieces.scores.items()})
    no_bytes = Twin.from_str(twin.to_str().replace('"byte_fallback":true', '"byte_fallback":false'))
    for wrong in (build_twin(backwards), no_bytes):
        with pytest.raises(ValueError, match=r"its twin encodes (.|\n)* SentencePiece as"):
            check_twin(wrong, ours.path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "not a BPE model"),
        ({"byte_fallback": False}, "no byte pieces"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalises text"),
        ({"remove_extra_whitespaces": True}, "removes extra white space"),
        ({"user_defined_symbols": ["<x>"]}, "symbols defined by the user"),
    ],
)
def test_models_without_a_twin_are_refused(tmp_path: Path, options: dict[str, object], reason: str) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(trained(library_text(30_000), **{"vocab_size": 500, **options}))
    with pytest.raises(ValueError, match=reason):
        read_pieces(file)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{}")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        read_pieces(tmp_path / "t")
