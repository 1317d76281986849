"""`--estimate`: the memory that one rank of a run needs, from its shapes alone. Imports no torch.

What lives all the time, for P parameters spread over `shard` ranks (FSDP2; HSDP's groups hold copies):

    weights       4·P / shard    float32, the optimizer's
    moments       8·P / shard    AdamW's two, float32; of the layers' matrices with Muon one, 4·P / shard
    gradients     4·P / shard    float32, from a layer's backward pass to the optimizer step

What lives for one micro-batch of T = B·S tokens, with elements of e bytes (2 in bfloat16), comes from what autograd
keeps of each layer. In elements per token, for lanes L, width D, SwiGLU width F, keys K (both of all lanes), heads H:

    residual    2·L·D           before attention and before SwiGLU, with L norms' factors each in float32; the normed
                                state is not kept (model/add_norm_linear.py)
    attention   4·D + 3·K       projections D + 2·K, rotated queries and keys D + K, output as attention and
                                as wo take it 2·D; and H sums in float32
    SwiGLU      4·F or 2·F      projections 2·F; silu(gate) and their product, which `selective` and the compiler
                                compute again

With checkpointing in segments a layer keeps nothing itself. Each segment keeps what enters it, one stream for all
lanes and the partial outputs under way (model/segments.py), and one segment at a time has its layers' tensors during
its backward pass. The CPU's attention keeps its masks as numbers, S a token for each kind of mask.

A step's peak is the largest of these moments: the loss, when everything of the forward pass is kept; the backward
pass of each layer, from the last, with the gradients so far; the optimizer step. In a backward pass come working
tensors: the gradients of the residual and of the partial outputs under way, those between a layer's operations
(WORKING), and the gathered weights and unsharded gradients of the layer and its neighbour. tests/unit/test_estimate.py
holds the sum against peaks measured in runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from model.config import KINDS, LaneformerConfig, segment_length
from train.config import RunConfig

# Tensors (L, T, D) between the operations of a block's backward pass.
WORKING, WORKING_COMPILED = 4, 2


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank (one GPU), and when the peak is reached."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass of one micro-batch, with the loss's."""
    peak: int
    moment: str
    host_copy: int
    """What an asynchronous save holds in the host's memory (on a CPU it adds to the peak)."""


def told(config: RunConfig, *, as_json: bool = False) -> str:
    """The estimate as a table, or as one JSON object of bytes."""
    found = estimate(config)
    if as_json:
        return json.dumps(asdict(found))
    parallel, train, model = config.parallel, config.train, config.model
    per_token = found.activations / (train.local_batch_size * train.seq_len)
    unit, size = ("GiB", 2**30) if found.peak >= 2**30 else ("MiB", 2**20)
    rows = {
        "weights, float32": found.weights,
        "the optimizer's state, float32": found.optimizer,
        "gradients, float32": found.gradients,
        "kept for the backward pass": found.activations,
        "peak": found.peak,
    }
    if found.host_copy:
        rows["on the host, while a save is written"] = found.host_copy
    kernels = "compiled" if parallel.compile else "not compiled"
    lines = [
        f"memory of one of {config.cluster.ranks:,} ranks; {model.num_parameters():,} parameters, "
        f"{train.local_batch_size} x {train.seq_len} tokens at a time",
        f"activation_checkpoint={parallel.activation_checkpoint}, loss_chunks={parallel.loss_chunks}, "
        f"{parallel.param_dtype}, {kernels}, {config.cluster.device}",
        *(f"{name:<36} {value / size:9.2f} {unit}" for name, value in rows.items()),
        f"The peak is reached in: {found.moment}. Kept for one token: {per_token / 1e6:.2f} MB.",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Run:
    """What the formulas need of a configuration."""

    sizes: LaneformerConfig
    tokens: int  # of a micro-batch
    seq_len: int
    shard: int
    element: int
    reduced: int  # bytes of a gradient's element while ranks add it up
    cuda: bool
    compiled: bool
    policy: str
    chunks: int
    accumulates: bool
    muon: bool

    @property
    def swiglu_again(self) -> bool:
        """Whether silu and the product of SwiGLU are computed again rather than kept."""
        return self.policy == "selective" or self.compiled

    @property
    def wide(self) -> int:
        """Bytes of one tensor (L, T, D)."""
        return self.sizes.num_lanes * self.tokens * self.sizes.hidden_size * self.element


def estimate(config: RunConfig) -> Estimate:
    """Memory of one rank in a training step of `config`."""
    parallel, train, cluster = config.parallel, config.train, config.cluster
    cuda = cluster.device == "cuda"
    run = _Run(
        sizes=config.model,
        tokens=train.local_batch_size * train.seq_len,
        seq_len=train.seq_len,
        shard=config.shard_ranks,
        element=2 if parallel.param_dtype == "bfloat16" else 4,
        reduced=2 if parallel.reduce_dtype == "bfloat16" else 4,
        cuda=cuda,
        compiled=parallel.compile,
        policy=parallel.activation_checkpoint,
        chunks=parallel.loss_chunks,
        muon=config.optim.name == "muon",
        accumulates=train.global_batch_size > train.local_batch_size * cluster.ranks,
    )
    parameters = config.model.num_parameters()
    weights, moments = 4 * parameters // run.shard, config.optimizer_bytes // run.shard
    sizes = run.sizes
    rotary = 4 * sizes.max_position_embeddings * sizes.head_dim
    resident = weights + moments + rotary + _batch_bytes(run)
    moment, most = max(_moments(run, 4 * parameters // run.shard).items(), key=lambda item: item[1])
    return Estimate(
        weights=weights,
        gradients=4 * parameters // run.shard,
        optimizer=moments,
        activations=_kept_by_layers(run, sizes.num_hidden_layers) + _kept_at_end(run) + _logits(run)[0],
        peak=resident + most,
        moment=moment,
        host_copy=weights + moments if config.checkpoint.asynchronous else 0,
    )


def _batch_bytes(run: _Run) -> int:
    """Tokens, labels and positions, 64-bit; and on the CPU the attention masks, boolean and as numbers."""
    sizes = run.sizes
    swa, full = bool(sizes.swa_layers), len(sizes.swa_layers) < sizes.num_hidden_layers
    hides = sizes.sliding_window is not None and sizes.sliding_window < run.seq_len
    masks = full + (swa and (hides or not full))
    return run.tokens * (24 + (0 if run.cuda else masks * run.seq_len * (1 + run.element)))


def _moments(run: _Run, all_gradients: int) -> dict[str, int]:
    """Bytes beyond what is resident at the moments of a step that may be its peak."""
    sizes, depth = run.sizes, run.sizes.num_hidden_layers
    head, layer = _head_parameters(sizes), sizes._block_matmul_weights()
    earlier = all_gradients if run.accumulates else 0  # of the micro-batch before
    gathered_head = head * run.element
    kept, working = _logits(run)
    moments = {
        "loss": earlier
        + _kept_by_layers(run, depth)
        + _kept_at_end(run)
        + gathered_head
        + max(kept, working),
        "optimizer step": all_gradients + (_muon_bytes(run) if run.muon else 0),
    }
    segment = segment_length(run.policy)
    for i in reversed(range(depth)):
        # Weights gathered of this layer and the next one fetched; gradients before and after their reduction.
        parameters = layer * (2 * run.element + run.element + run.reduced)
        gradients = earlier if run.accumulates else 4 * (head + layer * (depth - 1 - i)) // run.shard
        pending = 1 + 2 * min(sizes.broadcast_delay, depth - i)  # gradients of residual and partials
        again = _layer_bytes(run) * (i % segment + 1) if segment else _recomputed_bytes(run)
        moments[f"backward of layer {i}"] = (
            gradients
            + _kept_by_layers(run, i + 1)
            + again
            + (pending + (WORKING_COMPILED if run.compiled else WORKING)) * run.wide
            + parameters
        )
    return moments


def _muon_bytes(run: _Run) -> int:
    """Copies of its weights at logged steps (train/lanes.py), and two layers' matrices on their way between ranks."""
    layer = 4 * run.sizes._block_matmul_weights() // run.shard
    return run.sizes.num_hidden_layers * layer + 2 * 2 * layer


def _head_parameters(sizes: LaneformerConfig) -> int:
    """Parameters of the head, whose gathered form stays through the loss."""
    return sizes._head_weights()


def _layer_bytes(run: _Run) -> int:
    """What autograd keeps of one layer that is not in a segment (the table above)."""
    sizes = run.sizes
    queries, keys = sizes.hidden_size, sizes.num_key_value_heads * sizes.head_dim
    swiglu = 2 if run.swiglu_again else 4
    elements = 4 * queries + 3 * keys + swiglu * sizes.intermediate_size
    singles = sizes.num_attention_heads + 2 * sizes.num_lanes
    return 2 * run.wide + run.tokens * (elements * run.element + singles * 4)


def _recomputed_bytes(run: _Run) -> int:
    """What one layer's backward pass has again of its SwiGLU: silu and the product."""
    return 2 * run.tokens * run.sizes.intermediate_size * run.element if run.swiglu_again else 0


def _kept_by_layers(run: _Run, layers: int) -> int:
    """Kept of the first `layers` layers, outside of what a segment has while it is computed again."""
    segment = segment_length(run.policy)
    if segment is None:
        return layers * _layer_bytes(run)
    return round(_entering_segments(run.sizes, segment, layers) * run.wide)


def _entering_segments(sizes: LaneformerConfig, segment: int, layers: int) -> float:
    """Tensors (L, T, D) that enter the segments among the first layers, those that enter several counted once."""
    entering: set[tuple[str, int]] = set()
    streams, rest = 0, 0
    for first in range(0, layers, segment):
        streams += 1
        if first and sizes.changes_rest(range(first - segment, first)):
            rest += 1
        for layer in range(max(first - sizes.broadcast_delay, 0), first):
            entering |= {(kind, layer) for kind in KINDS if sizes.is_awaited(layer, kind)}
    return len(entering) + rest + streams / sizes.num_lanes


def _kept_at_end(run: _Run) -> int:
    """Of the final norm and the head: the last residual, the lanes' sum before the scale, the head's input."""
    return run.wide + 2 * run.tokens * run.sizes.hidden_size * run.element


def _logits(run: _Run) -> tuple[int, int]:
    """Of the loss: bytes kept for its backward pass, and bytes at its own peak.

    In plain operations: logits (and in float32, if they are not), log-probabilities, and in the backward pass these
    and two gradients. Compiled: the logits and their gradient. In chunks of the sequence, of one chunk at a time.
    """
    logits = run.tokens * run.sizes.vocab_size // run.chunks
    if run.compiled:
        return logits * run.element, 2 * logits * run.element
    return 4 * logits, 12 * logits
