"""Generate text with a key/value cache, all lanes in one process.

`Decoder.advance` runs any number of new tokens through the model and returns the logits after the last one: a prompt
at once, a prompt in chunks, or one token. The partial outputs that travel between layers never leave one call, so the
cache holds keys and values only.

Shape suffixes: L lanes   B batch   C new columns   T = B·C   D hidden width   V vocabulary   H half the head width
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from model.kv_cache import KeyValueCache, LayerCache
from model.laneformer import LaneAttention, LaneBlock, Laneformer
from model.lanes import heads_first, increment, lanes_first, rotate

Partials = tuple[torch.Tensor | None, torch.Tensor | None]  # of attention and SwiGLU


class Decoder:
    """A batch of sequences under way. Rows may differ in length: shorter prompts are padded on the left."""

    def __init__(self, model: Laneformer, prompts: Sequence[Sequence[int]], max_new_tokens: int):
        if not prompts or not all(prompts):
            raise ValueError("every prompt must have at least one token")
        self.model = model
        self.sizes = model.sizes
        longest = max(map(len, prompts))
        limit = self.sizes.max_position_embeddings
        if longest > limit:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_position_embeddings {limit}")
        device = model.tok_embeddings.weight.device
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        self.prompt_BC = torch.tensor(rows, device=device)
        self.cache = KeyValueCache(
            self.sizes,
            padding_B=torch.tensor(padding, device=device),
            capacity=min(longest + max_new_tokens, limit),
            like=model.tok_embeddings.weight,
        )

    def prefill(self, chunk: int | None = None) -> torch.Tensor:
        """Read the prompts, `chunk` columns at a time (None: at once); returns logits (B, V) of the next token."""
        pieces = self.prompt_BC.split(chunk or self.prompt_BC.shape[1], dim=1)
        logits_BV = self.advance(pieces[0])
        for piece in pieces[1:]:
            logits_BV = self.advance(piece)
        return logits_BV

    @torch.no_grad()
    def advance(self, tokens_BC: torch.Tensor) -> torch.Tensor:
        """Read tokens (B, C) after those before; returns logits (B, V) of what follows the last."""
        sizes, cache, model = self.sizes, self.cache, self.model
        batch, count = tokens_BC.shape
        first = cache.columns
        if first + count > cache.capacity:
            raise ValueError(f"{first} + {count} columns exceed the cache's {cache.capacity}")
        columns_C = torch.arange(first, first + count, device=tokens_BC.device)
        positions_BC = (columns_C - cache.padding_B[:, None]).clamp(min=0)
        cos_BCH, sin_BCH = model.rotary(positions_BC)
        x_LTD = model.tok_embeddings(tokens_BC).view(1, batch * count, -1)
        x_LTD = x_LTD.expand(sizes.num_lanes, -1, -1)
        under_way: deque[Partials] = deque([(None, None)] * sizes.broadcast_delay)
        for block, layer_cache in zip(model.layers.values(), cache.layers, strict=True):
            awaited: Partials = under_way.popleft() if under_way else (None, None)
            x_LTD, partials = self._block(
                cast(LaneBlock, block), x_LTD, awaited, cos_BCH, sin_BCH, layer_cache
            )
            under_way.append(partials)
        cache.columns += count
        last_LBD = x_LTD.unflatten(1, (batch, count))[:, :, -1]
        return model.lm_head(model.norm(last_LBD)[:, None])[:, 0]

    def _block(
        self,
        block: LaneBlock,
        x_LTD: torch.Tensor,
        awaited: Partials,
        cos_BCH: torch.Tensor,
        sin_BCH: torch.Tensor,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, Partials]:
        attention_LTD = self._attention(block.attention, block.attention_norm(x_LTD), cos_BCH, sin_BCH, cache)
        x_LTD = x_LTD + increment(block.attention_exchange, attention_LTD, awaited[0])
        mlp_LTD = block.feed_forward(block.ffn_norm(x_LTD))
        x_LTD = x_LTD + increment(block.mlp_exchange, mlp_LTD, awaited[1])
        return x_LTD, (attention_LTD, mlp_LTD)

    def _attention(
        self,
        module: LaneAttention,
        x_LTD: torch.Tensor,
        cos_BCH: torch.Tensor,
        sin_BCH: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        batch = cos_BCH.shape[0]
        q, k, v = (
            heads_first(x, batch, module.head_dim) for x in module.wqkv(x_LTD).split(module.split, dim=-1)
        )
        cos, sin = cos_BCH[:, None, None], sin_BCH[:, None, None]
        q_BNCE, k_BKCE = rotate(q, cos, sin).flatten(1, 2), rotate(k, cos, sin).flatten(1, 2)
        keys, values, mask = cache.extend(self.cache.columns, k_BKCE, v.flatten(1, 2), self.cache.padding_B)
        grouped = q_BNCE.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(q_BNCE, keys, values, attn_mask=mask, enable_gqa=grouped)
        return module.wo(lanes_first(out, module.num_lanes))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the likeliest; top_p keeps the smallest set of tokens
    whose probabilities reach it. The same seed gives the same text."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")

    def draw(self, logits_BV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Next tokens (B,), on the CPU."""
        if self.temperature == 0:
            return logits_BV.argmax(-1).cpu()
        probabilities_BV = (logits_BV.float().cpu() / self.temperature).softmax(-1)
        if self.top_p < 1:
            sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
            beyond_BV = sorted_BV.cumsum(-1) - sorted_BV >= self.top_p  # the mass before a token is enough
            probabilities_BV = torch.zeros_like(sorted_BV).scatter(
                -1, order_BV, sorted_BV.masked_fill(beyond_BV, 0)
            )
        return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished sequence.

    end_reason: "eos", "stop" (a stop string; it is cut off), "length" (max_new_tokens), "context" (the model's
    context is full). tokens: what was drawn, EOS included.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    end_reason: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    seconds_to_first_token: float
    tokens_per_second: float  # after the first token, over all rows


def generate(
    model: Laneformer,
    prompts: Sequence[Sequence[int]],
    decode: Callable[[list[int]], str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
    stops: Sequence[str] = (),
    prefill_chunk: int | None = None,
    on_token: Callable[[list[str]], None] | None = None,
) -> tuple[list[Generation], Timing]:
    """Continue each prompt (token ids). `decode` turns ids into text; `on_token` gets all texts after each step.

    Raises ValueError for an empty prompt or one longer than the model's context.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    sampling = sampling or Sampling()
    begin = time.perf_counter()
    decoder = Decoder(model, prompts, max_new_tokens)
    generator = torch.Generator().manual_seed(sampling.seed)
    room = decoder.cache.capacity - decoder.prompt_BC.shape[1]
    drawn: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    ends: list[str | None] = [None] * len(prompts)
    first_token = begin
    logits_BV = decoder.prefill(prefill_chunk)
    for step in range(max_new_tokens):
        tokens_B = sampling.draw(logits_BV, generator)
        if step == 0:
            first_token = time.perf_counter()
        for row, token in enumerate(tokens_B.tolist()):
            if ends[row] is None:
                drawn[row].append(token)
                texts[row], ends[row] = _read(drawn[row], decode, eos_id, stops, max_new_tokens)
        if on_token:
            on_token(texts)
        if all(ends):
            break
        if step == room:
            ends = [end or "context" for end in ends]
            break
        logits_BV = decoder.advance(tokens_B[:, None].to(decoder.prompt_BC.device))
    seconds = time.perf_counter() - first_token
    later = sum(len(tokens) - 1 for tokens in drawn)
    generations = [
        Generation(prompt_tokens=len(prompt), tokens=tokens, text=text, end_reason=end or "length")
        for prompt, tokens, text, end in zip(prompts, drawn, texts, ends, strict=True)
    ]
    rate = later / seconds if seconds > 0 else 0.0
    return generations, Timing(seconds_to_first_token=first_token - begin, tokens_per_second=rate)


def _read(
    tokens: list[int],
    decode: Callable[[list[int]], str],
    eos_id: int | None,
    stops: Sequence[str],
    limit: int,
) -> tuple[str, str | None]:
    """The text of the tokens, without EOS and cut at the first stop string, and why it ends here, if it does."""
    ended = tokens[-1] == eos_id
    text = decode(tokens[:-1] if ended else tokens)
    found = [text.index(stop) for stop in stops if stop in text]
    if found:
        return text[: min(found)], "stop"
    if ended:
        return text, "eos"
    return text, "length" if len(tokens) == limit else None
