"""The exported modeling file, loaded by transformers, against our own model: logits, generation, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_mixtures.tokenizer import Tokenizer
from model.decode import generate
from model.delayed_tp import LaneGroup
from model.hf_export import export_checkpoint
from model.laneformer import Laneformer
from tests.unit.hf_fixtures import VARIANTS, small_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is in the dev extra")
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

PROMPTS = [[1, 40, 300, 7, 7, 290], [1, 5], [1, *range(260, 280)]]


@pytest.fixture(scope="module")
def exports(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """variant → (our model, exported folder), each made once, in float32."""
    root, made = tmp_path_factory.mktemp("exports"), {}

    def export(variant: str) -> tuple[Laneformer, Path]:
        if variant not in made:
            model = small_checkpoint(variant, tiny_data / "tokenizer.model", root / "checkpoints" / variant)
            folder = export_checkpoint(root / "checkpoints" / variant, root / variant, torch.float32)
            made[variant] = model, folder
        return made[variant]

    return export


def load(folder: Path, attention: str = "sdpa", dtype: Any = "auto") -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, attn_implementation=attention, dtype=dtype
    )
    return model.eval()


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    left = side == "left"
    ids = [[0] * (longest - len(r)) * left + r + [0] * (longest - len(r)) * (not left) for r in rows]
    mask = [[int(t != 0) for t in row] for row in ids]
    return torch.tensor(ids), torch.tensor(mask)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 384, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_generation_equal_ours(exports: Any, variant: str) -> None:
    ours, folder = exports(variant)
    ids = tokens(2, 24)
    expected = ours(ids)
    assert expected.std() > 0.1
    for attention in ("sdpa", "eager"):
        theirs = load(folder, attention)
        assert theirs.config._attn_implementation == attention
        assert theirs.dtype == torch.float32
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-5)
        for side in ("left", "right"):
            padded_ids, mask = padded(PROMPTS, side)
            logits = theirs(padded_ids, attention_mask=mask).logits
            for row, prompt in enumerate(PROMPTS):
                alone = ours(torch.tensor([prompt]))[0]
                torch.testing.assert_close(logits[row][mask[row] == 1], alone, rtol=0, atol=1e-5)
        if attention == "sdpa" or variant == "base":
            check_generation(ours, theirs)


def check_generation(ours: Laneformer, theirs: Any) -> None:
    """Greedy, over a batch of prompts of different lengths, far beyond the window."""
    expected, _ = generate(LaneGroup.of(ours), PROMPTS, lambda ids: "", max_new_tokens=30, eos_id=2)
    ids, mask = padded(PROMPTS, "left")
    got = theirs.generate(ids, attention_mask=mask, max_new_tokens=30)[:, ids.shape[1] :].tolist()
    for row, one in zip(got, expected, strict=True):
        assert row[: len(one.tokens)] == one.tokens
        assert one.end_reason == "eos" or len(one.tokens) == 30


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(exports: Any) -> None:
    ours, folder = exports("base")
    ids, positions = tokens(2, 24), torch.tensor([[*range(10), *range(14)], [*range(3), *range(21)]])
    expected = ours(ids, positions)
    got = load(folder)(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (expected - ours(ids)).abs().max() > 1e-2


@torch.no_grad()
def test_cached_chunks_equal_one_pass(exports: Any) -> None:
    ours, folder = exports("base")
    theirs, ids = load(folder), tokens(2, 30)
    cache: Any = None
    pieces = []
    for piece in ids.split([9, 1, 1, 12, 7], dim=1):
        outputs = theirs(piece, past_key_values=cache)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), ours(ids), rtol=0, atol=1e-5)
    windowed = [layer.keys.shape[2] for layer in cache.layers]
    assert windowed == [5, 5, 30, 5, 30]  # a window of 6 holds 5 besides the token that looks


@torch.no_grad()
def test_beams_and_kept_logits(exports: Any) -> None:
    _, folder = exports("base")
    theirs = load(folder)
    ids, mask = padded(PROMPTS, "left")
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    cached, fresh = (theirs.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, fresh)
    whole = theirs(ids, attention_mask=mask).logits
    torch.testing.assert_close(theirs(ids, attention_mask=mask, logits_to_keep=2).logits, whole[:, -2:])
    chosen = theirs(ids, attention_mask=mask, logits_to_keep=torch.tensor([3, 5])).logits
    torch.testing.assert_close(chosen, whole[:, [3, 5]])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_with_checkpointing(exports: Any, reentrant: bool) -> None:
    _, folder = exports("base")
    ids = tokens(2, 20)
    labels = ids.clone()
    labels[:, :4] = -100
    gradients = []
    for checkpointing in (False, True):
        model = load(folder).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        calls: list[int] = []
        first = model.model.layers[0].feed_forward
        first.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        loss = model(ids, labels=labels).loss
        loss.backward()
        assert len(calls) == 1 + checkpointing
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    logits = load(folder)(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    torch.testing.assert_close(loss.detach(), expected.detach())
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_bfloat16_stays_bfloat16(exports: Any) -> None:
    ours, folder = exports("base")
    theirs = load(folder, dtype=torch.bfloat16)
    ids = tokens(1, 24)
    with torch.no_grad():
        logits = theirs(ids).logits
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits.float(), ours(ids), rtol=0, atol=0.15)
        torch.testing.assert_close(
            load(folder, "eager", torch.bfloat16)(ids).logits, logits, rtol=0, atol=0.15
        )


def test_initial_weights_are_those_of_training(exports: Any) -> None:
    _, folder = exports("tied")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert model.lm_head.weight is model.model.tok_embeddings.weight
    deviations = {
        "model.tok_embeddings.weight": 32**-0.5,
        "model.layers.0.attention.wq.weight": 32**-0.5,
        "model.layers.0.attention.wo.weight": (32 * 10) ** -0.5,
        "model.layers.4.feed_forward.w2.weight": (64 * 10) ** -0.5,
    }
    parameters = dict(model.named_parameters())
    for name, deviation in deviations.items():
        assert parameters[name].std().item() == pytest.approx(deviation, rel=0.1)
    assert (parameters["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("variant", ["lane_norms", "tied", "vocab_parallel"])
def test_transformers_saves_what_it_loaded(exports: Any, variant: str, tmp_path: Path) -> None:
    _, folder = exports(variant)
    load(folder).save_pretrained(tmp_path)
    ids = tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(ids).logits, load(folder)(ids).logits)


def test_mistakes_are_named(exports: Any) -> None:
    theirs = load(exports("base")[1])
    ids = tokens(2, 8)
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens so far\) = \(2, 8\)"):
        theirs(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="are per lane and are not returned"):
        theirs(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        theirs()
    with pytest.raises(ValueError, match=r"attention_mask must be|static caches are not supported"):
        theirs.generate(ids, cache_implementation="static", max_new_tokens=3)


def test_chat_template_and_tokenizer_load(exports: Any, tiny_data: Path) -> None:
    from data_mixtures.chat import encode_conversation, encode_prompt

    ours = Tokenizer(tiny_data / "tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(exports("base")[1])
    question: Any = [{"role": "user", "content": "the lane  hears\n its neighbours"}]
    prompt = theirs.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert prompt == encode_prompt(ours, question)
    answer: Any = [*question, {"role": "assistant", "content": "two layers late"}]
    ids, mask = encode_conversation(ours, answer)
    got = theirs.apply_chat_template(answer, return_dict=True, return_assistant_tokens_mask=True)
    assert got["input_ids"] == ids
    assert got["assistant_masks"] == mask
    batch = theirs(["the lane", "and adds what they said"], padding=True)
    assert batch["input_ids"][0][-3:] == ours.encode("the lane", bos=True)[-3:]
    assert batch["input_ids"][1] == ours.encode("and adds what they said", bos=True)
    assert batch["attention_mask"][0][0] == 0
    assert theirs.decode(batch["input_ids"][0], skip_special_tokens=True) == "the lane"
