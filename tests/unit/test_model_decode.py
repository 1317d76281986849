"""Decoding with a cache equals the full forward, for every variant; sampling, stops, end reasons."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from model.decode import Decoder, Sampling
from model.decode import generate as generate_by_group
from model.delayed_tp import LaneGroup
from model.kv_cache import plan_step
from model.laneformer import Laneformer, build_model
from tests.architectures import architecture

VARIANTS: dict[str, dict[str, Any]] = {
    "as released": {},
    "no delay": {"broadcast_delay": 0},
    "delay of the depth": {"broadcast_delay": 5},
    "early comm": {"use_early_comm": True},
    "no attention comm": {"use_attention_comm": False},
    "no mlp comm": {"use_mlp_comm": False},
    "lane head": {"lm_head_type": "lane"},
    "vocab parallel head": {"lm_head_type": "vocab_parallel"},
    "lane norms": {"replicated_rmsn_scale": False},
    "norm of the sum": {"pre_norm_lane_agg": True},
    "tied": {"tie_word_embeddings": True},
    "one lane": {"num_lanes": 1, "broadcast_delay": 0},
    "window of one": {"sliding_window": 1},
    "window beyond the context": {"sliding_window": 100},
    "no windows": {"sliding_window": None, "swa_layers": []},
    "all heads": {"num_key_value_heads": 8},
}


def model_of(variant: str) -> Laneformer:
    config = architecture(**VARIANTS[variant])
    return build_model(config, dtype=torch.float64).requires_grad_(False).eval()


def decoder_of(model: Laneformer, prompts: list[list[int]], max_new_tokens: int) -> Decoder:
    return Decoder(LaneGroup.of(model), prompts, max_new_tokens)


def generate(model: Laneformer, prompts: list[list[int]], *args: Any, **options: Any) -> Any:
    return generate_by_group(LaneGroup.of(model), prompts, *args, **options)


def logits_of(decoder: Decoder, tokens: list[int], chunk: int | None = None) -> torch.Tensor:
    """Logits (S, V) after the prompt and after each of the tokens, of the only row."""
    logits = [decoder.prefill(chunk).clone()]
    return torch.cat(logits + [decoder.advance(torch.tensor([[token]])).clone() for token in tokens])


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 48, (count,), generator=generator).tolist()


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("0") + token) for token in tokens)


def full(model: Laneformer, tokens: list[int]) -> torch.Tensor:
    """Logits (S, V) of a whole sequence, without a cache."""
    return model(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prompt_length", [1, 5, 20])
def test_cached_steps_equal_the_full_forward(variant: str, prompt_length: int) -> None:
    model, tokens = model_of(variant), ids(40)
    expected = full(model, tokens)
    decoder = decoder_of(model, [tokens[:prompt_length]], max_new_tokens=64)
    got = logits_of(decoder, tokens[prompt_length:])
    torch.testing.assert_close(got, expected[prompt_length - 1 :], rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", ["as released", "window of one", "vocab parallel head"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 30])
def test_prefill_in_chunks_equals_prefill_at_once(variant: str, chunk: int) -> None:
    model, tokens = model_of(variant), ids(30)
    at_once, in_chunks = (decoder_of(model, [tokens], max_new_tokens=8) for _ in range(2))
    torch.testing.assert_close(in_chunks.prefill(chunk), at_once.prefill(), rtol=0, atol=1e-9)
    step = torch.tensor([[3]])
    torch.testing.assert_close(in_chunks.advance(step), at_once.advance(step), rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", ["as released", "window of one", "lane head"])
def test_rows_of_different_lengths_do_not_disturb_each_other(variant: str) -> None:
    model = model_of(variant)
    prompts = [ids(3, 1), ids(17, 2), ids(9, 3), ids(1, 4)]
    together, _ = generate(model, prompts, letters, max_new_tokens=20)
    for prompt, row in zip(prompts, together, strict=True):
        (alone,), _ = generate(model, [prompt], letters, max_new_tokens=20)
        assert row == alone


def test_a_row_ends_by_its_own_context() -> None:
    """A short prompt beside a long one, on whose account it is padded, still uses the whole context."""
    model = model_of("as released")
    (short, long, other), _ = generate(model, [ids(3), ids(60), ids(5)], letters, max_new_tokens=100)
    assert (short.end_reason, len(short.tokens)) == ("context", 62)
    assert (long.end_reason, len(long.tokens)) == ("context", 5)
    assert (other.end_reason, len(other.tokens)) == ("context", 60)
    (alone,), _ = generate(model, [ids(3)], letters, max_new_tokens=100)
    assert alone == short


@pytest.mark.parametrize("chunk", [3, 8])
def test_padded_prompts_in_chunks(chunk: int) -> None:
    model = model_of("as released")
    prompts = [ids(3, 1), ids(20, 2)]
    decoder = decoder_of(model, prompts, max_new_tokens=4)
    logits_BV = decoder.prefill(chunk)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(logits_BV[row], full(model, prompt)[-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finished_rows_leave_without_disturbing_the_others(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampling = model_of("as released"), Sampling(temperature=temperature)
    prompts = [ids(4, seed) for seed in range(8)]
    free, _ = generate(model, prompts, letters, max_new_tokens=30, sampling=sampling)
    batches: list[int] = []
    advance = Decoder.advance
    monkeypatch.setattr(Decoder, "advance", lambda self, t: batches.append(t.shape[0]) or advance(self, t))
    often = Counter(token for row in free for token in set(row.tokens)).most_common(1)[0][0]
    ended, _ = generate(model, prompts, letters, max_new_tokens=30, sampling=sampling, eos_id=often)
    for row, other in zip(ended, free, strict=True):
        stop = other.tokens.index(often) + 1 if often in other.tokens else 30
        assert row.tokens == other.tokens[:stop]
    assert batches[0] == 8
    assert 1 <= batches[-1] < 8


@pytest.mark.parametrize("count", [1, 5, 9])
def test_every_query_sees_something(count: int) -> None:
    """A softmax over nothing is not a number in some attention kernels, and would spread from the padding."""
    for first in (0, 3, 12):
        step = plan_step(first, count, 6, 6, torch.tensor([0, 4, 14]), torch.device("cpu"))
        assert step.mask is not None
        assert step.mask.any(-1).all()


def test_float32_stays_within_1e_5() -> None:
    model, tokens = build_model(architecture()).requires_grad_(False), ids(64)
    got = logits_of(decoder_of(model, [tokens[:10]], max_new_tokens=54), tokens[10:], chunk=4)
    torch.testing.assert_close(got, full(model, tokens)[9:], rtol=0, atol=1e-5)


def test_greedy_text_is_what_the_full_forward_gives() -> None:
    model, tokens = model_of("as released"), ids(4)
    (result,), timing = generate(model, [tokens], letters, max_new_tokens=30)
    for _ in range(30):
        tokens.append(int(full(model, tokens)[-1].argmax()))
    assert result.tokens == tokens[4:]
    assert (result.end_reason, result.prompt_tokens, result.text) == ("length", 4, letters(tokens[4:]))
    assert timing.seconds_to_first_token > 0


def test_a_window_layer_keeps_no_more_than_its_window() -> None:
    decoder = decoder_of(model_of("as released"), [ids(10)], max_new_tokens=30)
    assert [layer.slots for layer in decoder.cache.layers] == [6, 6, 40, 6, 40]
    assert decoder.cache.bytes() == 2 * 4 * 4 * (3 * 6 + 2 * 40) * 8  # K and V, heads, width, slots, float64


def test_end_reasons() -> None:
    model, prompt = model_of("as released"), ids(6)
    (free,), _ = generate(model, [prompt], letters, max_new_tokens=20)
    third = free.tokens[2]
    at = free.tokens.index(third)
    (ended,), _ = generate(model, [prompt], letters, max_new_tokens=20, eos_id=third)
    assert (ended.end_reason, ended.tokens, ended.text) == (
        "eos",
        free.tokens[: at + 1],
        letters(free.tokens[:at]),
    )
    stop = letters(free.tokens[2:4])
    cut = free.text.index(stop)
    (stopped,), _ = generate(model, [prompt], letters, max_new_tokens=20, stops=["~", stop])
    assert (stopped.end_reason, stopped.text) == ("stop", free.text[:cut])
    (filled,), _ = generate(model, [ids(60)], letters, max_new_tokens=20)
    assert (filled.end_reason, len(filled.tokens)) == ("context", 5)  # the last one is never read


def test_stop_strings_of_several_tokens_and_partial_characters() -> None:
    """Bytes become text only when a character is whole; a stop string is found as soon as it is."""
    model, prompt = model_of("as released"), ids(6)

    def decode(tokens: list[int]) -> str:
        return bytes([0xE2, 0x82, 0xAC][token % 3] for token in tokens).decode(errors="replace")

    (free,), _ = generate(
        model, [prompt], decode, max_new_tokens=40, sampling=Sampling(temperature=9, seed=2)
    )
    assert "€" in free.text
    (cut,), _ = generate(
        model, [prompt], decode, max_new_tokens=40, sampling=Sampling(temperature=9, seed=2), stops=["€"]
    )
    assert (cut.end_reason, cut.text) == ("stop", free.text[: free.text.index("€")])
    assert decode(cut.tokens).endswith("€")


def test_a_row_draws_the_same_whatever_rows_are_beside_it() -> None:
    model = model_of("as released")
    prompts = [ids(5, seed) for seed in range(3)]
    together, _ = generate(
        model, prompts, letters, max_new_tokens=15, sampling=Sampling(temperature=1.0, seed=7)
    )
    for row, prompt in enumerate(prompts):
        sampling = Sampling(temperature=1.0, seed=7 + row)
        (alone,), _ = generate(model, [prompt], letters, max_new_tokens=15, sampling=sampling)
        assert alone == together[row]


def test_on_token_sees_every_text() -> None:
    model, seen = model_of("as released"), []
    results, _ = generate(
        model, [ids(3), ids(5)], letters, max_new_tokens=4, on_token=lambda t: seen.append(list(t))
    )
    assert [[len(text) for text in texts] for texts in seen] == [[n, n] for n in range(1, 5)]
    assert seen[-1] == [result.text for result in results]


def test_sampling_is_seeded_and_top_p_cuts_the_tail() -> None:
    model, prompt = model_of("as released"), ids(6)

    def text(**options: Any) -> str:
        return generate(model, [prompt], letters, max_new_tokens=40, sampling=Sampling(**options))[0][0].text

    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1)
    assert text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)
    assert text(temperature=1.0, top_p=1e-9, seed=3) == text()  # only the likeliest token is left


def test_sampled_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits_BV = probabilities.log().expand(20_000, -1)
    generators = [torch.Generator().manual_seed(0)] * 20_000
    drawn = Sampling(temperature=1.0, top_p=0.75).draw(logits_BV, generators).bincount(minlength=4) / 20_000
    torch.testing.assert_close(drawn, torch.tensor([0.625, 0.375, 0.0, 0.0]), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [[]]}, "at least one token"),
        ({"prompts": [ids(65)]}, "65 tokens exceeds max_position_embeddings 64"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"stops": ["a", ""]}, "stop string must not be empty"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"prompts": [[1]], "max_new_tokens": 4} | options
    with pytest.raises(ValueError, match=message):
        generate(model_of("as released"), decode=letters, **given)


def test_sampling_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="temperature=-1"):
        Sampling(temperature=-1)
    with pytest.raises(ValueError, match="temperature=nan"):
        Sampling(temperature=float("nan"))
    with pytest.raises(ValueError, match="seed=-1"):
        Sampling(seed=-1)
    with pytest.raises(ValueError, match=r"top_p=0\.0"):
        Sampling(top_p=0.0)
