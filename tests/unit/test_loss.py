"""The training loss: whole and in chunks, told by row, with the z-loss and ignored labels."""

import math
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchtitan.components.loss import IGNORE_INDEX

from model.laneformer import Laneformer, build_model
from tests.unit.test_model_laneformer import VARIANTS, tiny
from train.loss import ChunkedRowCrossEntropy, loss_config, row_losses

TOKENS = torch.randint(0, 32, (3, 16), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 32, (3, 16), generator=torch.Generator().manual_seed(1))
LABELS[0, :7] = IGNORE_INDEX  # a whole chunk of four and a part of the next
LABELS[2] = IGNORE_INDEX  # a row of which nothing counts
VALID = torch.tensor(float((LABELS != IGNORE_INDEX).sum()))


def run(
    model: Laneformer, chunks: int, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The loss, each row's cross entropy and the gradients, as the trainer takes them."""
    loss_fn = loss_config(chunks, z_loss).build(compile_config=None)
    if isinstance(loss_fn, ChunkedRowCrossEntropy):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    loss, extra = loss_fn(model(TOKENS), LABELS, VALID)
    loss.backward()
    return loss.detach(), extra["rows"], [cast(torch.Tensor, p.grad) for p in model.parameters()]


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_chunks_give_the_same_loss_and_gradients(change: dict[str, Any], z_loss: float):
    config = tiny(**change)
    loss, rows, gradients = run(build_model(config), 1, z_loss)
    for chunks in (2, 4, 16):
        got_loss, got_rows, got_gradients = run(build_model(config), chunks, z_loss)
        torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(got_rows, rows, rtol=1e-6, atol=0)
        for got, expected in zip(got_gradients, gradients, strict=True):
            assert (got - expected).norm() <= 1e-6 * expected.norm()
    assert rows[2] == 0


def test_rows_by_hand():
    """The cross entropy of logits [2, 0] and [0, 1], and the squared logarithm of what they are divided by."""
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [5.0, -5.0]]])
    rows, minimised = row_losses(logits, torch.tensor([[0, 0, IGNORE_INDEX]]), z_loss=0.5)
    normaliser = [math.log(math.exp(2) + 1), math.log(1 + math.e)]
    nats = (normaliser[0] - 2) + (normaliser[1] - 0)
    assert rows.item() == pytest.approx(nats, rel=1e-6)
    assert minimised.item() == pytest.approx(nats + 0.5 * sum(z**2 for z in normaliser), rel=1e-6)


def test_z_loss_gradient_is_exact():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, IGNORE_INDEX, 4], [1, 2, 3]])
    logits.requires_grad_()
    _, minimised = row_losses(logits.float(), labels, 0.3)
    (got,) = torch.autograd.grad(minimised.sum(), logits)
    probability, normaliser = logits.softmax(-1), logits.logsumexp(-1, keepdim=True)
    target = torch.zeros_like(logits).scatter(-1, labels.clamp(min=0)[..., None], 1.0)
    expected = probability - target + 0.3 * 2 * normaliser * probability
    expected = expected.masked_fill((labels == IGNORE_INDEX)[..., None], 0)
    torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-6)


def test_validation_takes_no_gradients():
    model = build_model(tiny())
    loss_fn = loss_config(4, 0.0).build(compile_config=None)
    assert isinstance(loss_fn, ChunkedRowCrossEntropy)
    loss_fn.set_lm_head(model.lm_head)
    with torch.no_grad():
        whole, _ = row_losses(model(TOKENS), LABELS)
        model._skip_lm_head = True
        _, extra = loss_fn(model(TOKENS), LABELS)
    torch.testing.assert_close(extra["rows"], whole, rtol=1e-6, atol=0)
    assert all(p.grad is None for p in model.parameters())


def largest_allocation(chunks: int) -> int:
    """Bytes of the largest single allocation in a forward and backward pass."""
    model = build_model(tiny(vocab_size=4096))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run(model, chunks, 0.0)
    weights = 4096 * 32 * 4  # the gradients of embedding and head are needed in any case
    sizes = [event.self_cpu_memory_usage for event in record.events() or []]
    return max(size for size in sizes if size != weights)


def test_logits_are_never_whole():
    """The largest allocation is the logits, and falls with the number of chunks."""
    logits = TOKENS.numel() * 4096 * 4
    whole, chunked = largest_allocation(1), largest_allocation(8)
    print(f"largest allocation: {whole / logits:.2f} of the logits whole, {chunked / logits:.3f} in 8 chunks")
    assert whole >= logits
    assert chunked <= 2 * logits / 8
