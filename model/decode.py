"""Generate text with a key/value cache, by one process or by several that each hold some of the lanes.

`Decoder.advance` reads any number of new tokens and returns the logits after the last one: a prompt at once, a
prompt in chunks, or one token. The partial outputs that travel between layers never outlive one call, so the
cache holds keys and values only. Several processes run the same calls with the same arguments; each has the
logits of its own slice of the vocabulary, and `Decoder.draw` brings them to the same choice.

Shape suffixes: B batch   C new columns   V vocabulary, or this process's slice of it   P processes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from model.cuda_graphs import GraphedSteps
from model.delayed_tp import LaneGroup

Decode = Callable[[list[int]], str]


class Decoder:
    """A batch of sequences under way. Rows may differ in length: shorter prompts are padded on the left."""

    def __init__(self, group: LaneGroup, prompts: Sequence[Sequence[int]], max_new_tokens: int):
        if not prompts or not all(prompts):
            raise ValueError("every prompt must have at least one token")
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        self.limit = group.sizes.max_position_embeddings
        if longest > self.limit:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_position_embeddings {self.limit}")
        self.group = group
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.prompt_BC = torch.tensor(rows, device=group.device)
        self.cache = group.cache(
            padding_B=torch.tensor([longest - length for length in lengths], device=group.device),
            capacity=longest + min(max_new_tokens, self.limit - min(lengths)),
        )
        self.graphs: GraphedSteps | None = None

    def prefill(self, chunk: int | None = None) -> torch.Tensor:
        """Read the prompts, chunk columns at a time (None: all); returns logits (B, V) of the next token."""
        pieces = self.prompt_BC.split(chunk or self.prompt_BC.shape[1], dim=1)
        logits_BV = self.advance(pieces[0])
        for piece in pieces[1:]:
            logits_BV = self.advance(piece)
        return logits_BV

    @torch.inference_mode()
    def advance(self, tokens_BC: torch.Tensor) -> torch.Tensor:
        """Read tokens (B, C) after those before; returns logits (B, V) of what follows the last.

        Raises ValueError if the cache is full. A row beyond the model's context gives meaningless logits, but
        does not disturb the others. The next call may overwrite the logits.
        """
        positions_BC = self.cache.begin(tokens_BC.shape[1]).clamp_(max=self.limit - 1)
        if tokens_BC.shape[1] > 1 or self.group.device.type != "cuda":
            return self.group.logits(tokens_BC, positions_BC, self.cache.layers)
        self.graphs = self.graphs or GraphedSteps(self.group, tokens_BC, positions_BC)
        return self.graphs(tokens_BC, self.cache.layers)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows only (indices), in this order."""
        self.cache.keep(rows)
        self.graphs = None

    @torch.inference_mode()
    def draw(
        self, logits_BV: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator], cancel: bool
    ) -> tuple[torch.Tensor, bool]:
        """The next tokens (B,), the same in every process, and whether the first process wants to cancel."""
        exchange, vocabulary = self.group.exchange, self.group.part.vocabulary
        if exchange.size == 1:
            return sampling.draw(logits_BV, generators), cancel
        flag_B1 = torch.full_like(logits_BV[:, :1], cancel, dtype=torch.float64)
        if sampling.temperature == 0:
            best_B1, at_B1 = logits_BV.max(-1, keepdim=True)
            exchange.push(torch.cat([best_B1.double(), at_B1 + float(vocabulary.start), flag_B1], dim=1))
            got_PB3 = exchange.collect()
            # Of equal logits the lowest token wins, as it does in one process.
            winner_1B = got_PB3[:, :, 0].argmax(0, keepdim=True)
            return got_PB3[:, :, 1].gather(0, winner_1B)[0].long(), bool(got_PB3[0, 0, 2])
        slices = [len(part) for part in self.group.vocabularies()]
        padded_BV = torch.nn.functional.pad(logits_BV, (0, max(slices) - logits_BV.shape[1]))
        exchange.push(torch.cat([padded_BV.double(), flag_B1], dim=1))
        got_PBV = exchange.collect()
        whole_BV = torch.cat([got[:, :count] for got, count in zip(got_PBV, slices, strict=True)], dim=1)
        return sampling.draw(whole_BV, generators), bool(got_PBV[0, 0, -1])


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the likeliest; top_p keeps the smallest set of tokens
    whose probabilities reach it. Row r of a batch draws with seed + r, whatever the other rows are."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and not negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if not 0 <= self.seed < 2**62:
            raise ValueError(f"seed={self.seed} must lie in 0..2^62 - 1")

    def generators(self, rows: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(self.seed + row) for row in range(rows)]

    def draw(self, logits_BV: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Next tokens (B,), on the logits' device; each row takes one number from its generator."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        # Float32 would make the sum of a large vocabulary depend on the order of its tokens.
        weights_BV = (logits_BV.double() / self.temperature).softmax(-1)
        order_BV = None
        if self.top_p < 1:
            weights_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
            mass_before_BV = weights_BV.cumsum(-1) - weights_BV
            weights_BV = weights_BV.masked_fill(mass_before_BV >= self.top_p, 0)
        mass_BV = weights_BV.cumsum(-1)
        uniform_B = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        aim_B1 = uniform_B.to(mass_BV.device)[:, None] * mass_BV[:, -1:]
        # The first token whose cumulated mass exceeds the aim, which no token without mass can be.
        chosen_B1 = torch.searchsorted(mass_BV, aim_B1, right=True).clamp(max=mass_BV.shape[1] - 1)
        return (chosen_B1 if order_BV is None else order_BV.gather(-1, chosen_B1))[:, 0]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished sequence.

    end_reason: "eos", "stop" (a stop string; it is cut off), "length" (max_new_tokens), "context" (the model's
    context is full), "cancelled" (by the caller). tokens: what was drawn, EOS included.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    end_reason: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    seconds_to_first_token: float
    tokens_per_second: float
    """After the first token, over all rows."""


Answers = Callable[..., tuple[list[Generation], Timing]]
"""`model.engine.Engine.generate`: prompts, and how to continue them, to what has been generated."""


@dataclass
class _Row:
    """One sequence while it is generated."""

    prompt_tokens: int
    room: int
    """Tokens that fit: the last one drawn is never read, so it needs no position."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end_reason: str | None = None


def generate(
    group: LaneGroup,
    prompts: Sequence[Sequence[int]],
    decode: Decode,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
    stops: Sequence[str] = (),
    prefill_chunk: int | None = None,
    on_token: Callable[[list[str]], bool | None] | None = None,
) -> tuple[list[Generation], Timing]:
    """Continue each prompt (token ids). decode turns new ids into text.

    on_token gets all texts after each step; if it returns True, the rows still going end as "cancelled",
    after one more step. Of several processes only the first one's on_token counts.

    Raises ValueError for an empty prompt or stop string, or a prompt longer than the model's context.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    sampling = sampling or Sampling()
    begin = time.perf_counter()
    decoder = Decoder(group, prompts, max_new_tokens)
    rows = [_Row(prompt_tokens=len(p), room=decoder.limit - len(p) + 1) for p in prompts]
    alive, generators = list(rows), sampling.generators(len(rows))
    logits_BV = decoder.prefill(prefill_chunk)
    first_token, cancel = 0.0, False
    while True:
        tokens_B, cancelled = decoder.draw(logits_BV, sampling, generators, cancel)
        if cancelled:
            break
        for row, token in zip(alive, tokens_B.tolist(), strict=True):
            if row.end_reason is None:
                row.tokens.append(token)
                _settle(row, decode, eos_id, stops, max_new_tokens, read=on_token is not None)
        first_token = first_token or time.perf_counter()
        # Other processes learn of it with the next draw.
        cancel = bool(on_token and on_token([row.text for row in rows]))
        going = [i for i, row in enumerate(alive) if row.end_reason is None]
        if not going:
            break
        if 2 * len(going) <= len(alive):  # not at every end: it copies the cache
            index_B = torch.tensor(going, device=tokens_B.device)
            alive, generators = [alive[i] for i in going], [generators[i] for i in going]
            tokens_B = tokens_B[index_B]
            decoder.keep(index_B)
        logits_BV = decoder.advance(tokens_B[:, None])
    seconds = time.perf_counter() - first_token
    generations = [
        Generation(
            prompt_tokens=row.prompt_tokens,
            tokens=row.tokens,
            text=row.text,
            end_reason=row.end_reason or "cancelled",
        )
        for row in rows
    ]
    later = sum(len(row.tokens) - 1 for row in rows)
    rate = later / seconds if later else 0.0
    return generations, Timing(seconds_to_first_token=first_token - begin, tokens_per_second=rate)


def _settle(
    row: _Row, decode: Decode, eos_id: int | None, stops: Sequence[str], max_new_tokens: int, read: bool
) -> None:
    """See whether the row ends with its newest token; set its text if it does, or if read."""
    ended = row.tokens[-1] == eos_id
    tokens = row.tokens[:-1] if ended else row.tokens
    if ended:
        row.end_reason = "eos"
    elif len(row.tokens) == max_new_tokens:
        row.end_reason = "length"
    elif len(row.tokens) == row.room:
        row.end_reason = "context"
    # A character takes up to four tokens, and the tokens before the tail may change how its first one reads.
    tail = 4 * max(map(len, stops), default=0) + 8
    stopped = any(stop in decode(tokens[-tail:]) for stop in stops)
    if not (stopped or read or row.end_reason):
        return
    row.text = decode(tokens)
    found = [row.text.index(stop) for stop in stops if stop in row.text]
    if found:
        row.text, row.end_reason = row.text[: min(found)], "stop"
