from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.tokenizer import Tokenizer, train_tokenizer
from tests.unit.data_fixtures import SENTENCES, llama_like_tokenizer, small_tokenizer

# Everything but lone surrogates; U+2581 (SentencePiece's space) and control-token look-alikes come often.
TEXT = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from(["\u2581", " ", "\n", "\t", "<s>", "</s>", "<0x41>", "\x00"])
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module", params=["ours", "llama"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return small_tokenizer(path) if request.param == "ours" else llama_like_tokenizer(path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=TEXT)
def test_every_text_comes_back_and_its_bytes_are_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    prefix = int(tokenizer.adds_prefix_space and text != "")
    assert tokenizer.bytes_per_token()[ids].sum() == len(text.encode()) + prefix
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_control_tokens_are_added_only_on_request(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("a <s> b </s>")
    assert tokenizer.encode("a <s> b </s>", bos=True, eos=True) == [1, *plain, 2]
    assert tokenizer.decode([1, *plain, 2]) == "a <s> b </s>"
    assert (tokenizer.bytes_per_token()[[0, 1, 2]] == 0).all()


def test_batch_equals_single_texts(tokenizer: Tokenizer) -> None:
    texts = ["one", "", "two \u2581 three", "\n\n"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_trained_tokenizer_is_laid_out_like_llama(tmp_path: Path) -> None:
    ours = small_tokenizer(tmp_path / "a.model")
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.adds_prefix_space) == (1, 2, -1, False)
    assert ours.newline_is_atomic
    assert len(ours.encode("2025")) == 4
    assert small_tokenizer(tmp_path / "b.model").sha256 == ours.sha256


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_unusable_models_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk.model"
    junk.write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"junk\.model is not a SentencePiece model"):
        Tokenizer(junk)
    with pytest.raises(FileNotFoundError):
        Tokenizer(tmp_path / "absent.model")


def test_a_vocabulary_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary of 100000"):
        train_tokenizer(SENTENCES, tmp_path / "a.model", vocab_size=100_000)
