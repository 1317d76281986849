"""Sizes and invariants of a Laneformer, and the arithmetic that follows from them.

Nothing here needs torch, so a configuration can be composed, checked and costed on a login node. The field
names are those of the released Hugging Face configuration. The named sizes are the files of configs/model.

What the fields mean, for layer i with L lanes, delay d, and o_l the partial output of lane l:

| layers            | switch                             | what is added to the residual of lane l          |
|-------------------|------------------------------------|--------------------------------------------------|
| all, if d = 0     | (none applies)                     | Σ_j o_j: standard tensor parallelism             |
| i < d             | use_early_comm                     | Σ_j o_j, or √L · o_l when off                    |
| i ≥ d > 0         | use_attention_comm, use_mlp_comm   | o_l + Σ_{j≠l} p_j, or √L · o_l when off          |

p is the partial of the same kind of module (attention or SwiGLU) in layer i − d.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

LmHeadType = Literal["replicate", "lane", "vocab_parallel"]
Kind = Literal["attention", "mlp"]
Exchange = Literal["sum", "local", "delayed"]
KINDS: tuple[Kind, Kind] = ("attention", "mlp")
Kernels = Literal["auto", "triton", "torch"]

SIZES_DIR = Path(__file__).resolve().parent.parent / "configs" / "model"


@dataclass(frozen=True, kw_only=True)
class LaneformerConfig:
    """A complete, checked description of one architecture. Raises one ValueError that lists every problem."""

    vocab_size: int
    hidden_size: int
    """Width D of one lane's residual stream; every lane has all of it."""
    num_hidden_layers: int
    num_attention_heads: int
    """Query heads of a layer, over all lanes."""
    num_key_value_heads: int
    """Key/value heads of a layer, over all lanes."""
    intermediate_size: int
    """Width F of the SwiGLU, over all lanes."""
    num_lanes: int
    broadcast_delay: int
    """Layers between a partial output and its arrival on the other lanes; 0: standard tensor parallelism."""
    use_early_comm: bool
    """Whether lanes sum at once, which blocks, in the layers before the first arrival."""
    use_attention_comm: bool
    use_mlp_comm: bool
    lm_head_type: LmHeadType
    """replicate: one head on the mean over lanes; lane: one on all lanes' states side by side;
    vocab_parallel: each lane gives its slice of the vocabulary."""
    pre_norm_lane_agg: bool
    """Normalise the sum over lanes once, rather than average the lanes' normalised states."""
    replicated_rmsn_scale: bool
    """One norm scale (D,) for all lanes, rather than (L, D). The norm of pre_norm_lane_agg has one stream and
    hence always (D,)."""
    sliding_window: int | None
    """Tokens that a layer in swa_layers sees, the current one included."""
    swa_layers: tuple[int, ...]
    rope_theta: float
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if isinstance(self.swa_layers, list):
            object.__setattr__(self, "swa_layers", tuple(self.swa_layers))
        for name in ("rope_theta", "norm_eps"):
            if type(getattr(self, name)) is int:
                object.__setattr__(self, name, float(getattr(self, name)))
        # Relations are only worth reporting between values of the right type.
        problems = self._type_problems() or [*self._range_problems(), *self._relation_problems()]
        if problems:
            raise ValueError("invalid model configuration:\n" + "\n".join(f"- {p}" for p in problems))

    # Checks

    def _type_problems(self) -> list[str]:
        problems = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and type(value) is not int:
                problems.append(f"{field.name} must be an integer, got {value!r}")
            elif field.type is bool and type(value) is not bool:
                problems.append(f"{field.name} must be true or false, got {value!r}")
            elif field.type is float and type(value) is not float:
                problems.append(
                    f"{field.name} must be a number, got {value!r} (in YAML write 1.0e-5, not 1e-5)"
                )
        if self.lm_head_type not in get_args(LmHeadType):
            choices = ", ".join(get_args(LmHeadType))
            problems.append(f"lm_head_type must be one of {choices}; got {self.lm_head_type!r}")
        if self.sliding_window is not None and type(self.sliding_window) is not int:
            problems.append(f"sliding_window must be an integer or null, got {self.sliding_window!r}")
        if not isinstance(self.swa_layers, tuple) or any(type(i) is not int for i in self.swa_layers):
            problems.append(f"swa_layers must be a list of integers, got {self.swa_layers!r}")
        return problems

    def _range_problems(self) -> list[str]:
        counts = [field.name for field in dataclasses.fields(self) if field.type is int]
        counts.remove("broadcast_delay")
        problems = [f"{n} must be at least 1, got {getattr(self, n)}" for n in counts if getattr(self, n) < 1]
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < float("inf"):
                problems.append(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.broadcast_delay <= self.num_hidden_layers:
            problems.append(
                f"broadcast_delay must lie in 0..num_hidden_layers = 0..{self.num_hidden_layers}, "
                f"got {self.broadcast_delay}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            problems.append(f"sliding_window must be at least 1 token, got {self.sliding_window}")
        outside = [i for i in self.swa_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            problems.append(
                f"swa_layers must name layers 0..{self.num_hidden_layers - 1} (num_hidden_layers = "
                f"{self.num_hidden_layers}), got {outside}"
            )
        return problems

    def _relation_problems(self) -> list[str]:
        problems = []

        def divides(name: str, by: str, why: str) -> None:
            value, divisor = getattr(self, name), getattr(self, by)
            if value > 0 and divisor > 0 and value % divisor:
                problems.append(f"{name} {value} is not divisible by {by} {divisor}: {why}")

        divides("hidden_size", "num_attention_heads", "heads have equal width")
        divides(
            "num_attention_heads", "num_key_value_heads", "query heads share key/value heads in equal groups"
        )
        divides("num_attention_heads", "num_lanes", "a lane owns whole query heads")
        divides("num_key_value_heads", "num_lanes", "a lane owns whole key/value heads")
        divides("intermediate_size", "num_lanes", "lanes have equal width")
        if self.lm_head_type == "vocab_parallel":
            divides("vocab_size", "num_lanes", "with lm_head_type vocab_parallel lanes hold equal slices")
        heads = self.num_attention_heads
        if heads > 0 and self.hidden_size % heads == 0 and (self.hidden_size // heads) % 2:
            problems.append(
                f"head width hidden_size / num_attention_heads = {self.hidden_size} / {heads} = "
                f"{self.hidden_size // heads} must be even: rotary embedding turns pairs"
            )
        if list(self.swa_layers) != sorted(set(self.swa_layers)):
            problems.append(f"swa_layers must ascend without repeats, got {list(self.swa_layers)}")
        if self.swa_layers and self.sliding_window is None:
            problems.append(f"swa_layers {list(self.swa_layers)} need sliding_window, got null")
        if not self.swa_layers and self.sliding_window is not None:
            problems.append(
                f"sliding_window {self.sliding_window} has no effect with swa_layers []; set it to null"
            )
        for name in ("pre_norm_lane_agg", "tie_word_embeddings"):
            if getattr(self, name) and self.lm_head_type != "replicate":
                problems.append(f"{name} needs lm_head_type replicate, got {self.lm_head_type}")
        return problems

    # In and out

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "LaneformerConfig":
        """Build from a mapping that names every field and no other; raises ValueError otherwise."""
        if not isinstance(mapping, Mapping):
            raise ValueError(f"invalid model configuration: expected a mapping of fields, got {mapping!r}")
        names = [field.name for field in dataclasses.fields(cls)]
        problems = [f"unknown key {key!r}" for key in mapping if key not in names]
        problems += [f"missing key {name!r}" for name in names if name not in mapping]
        if problems:
            problems.append(f"the keys are: {', '.join(names)}")
            raise ValueError("invalid model configuration:\n" + "\n".join(f"- {p}" for p in problems))
        return cls(**mapping)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON and YAML values; from_dict's inverse."""
        return {**dataclasses.asdict(self), "swa_layers": list(self.swa_layers)}

    # Derived structure

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def window(self, layer: int) -> int | None:
        """Tokens that the layer sees, the current one included; None means all."""
        return self.sliding_window if layer in self.swa_layers else None

    def exchange(self, layer: int, kind: Kind) -> Exchange:
        """How lanes share the layer's partial outputs of one kind; see the table at the top."""
        if self.num_lanes == 1 or self.broadcast_delay == 0:
            return "sum"  # of one lane, all three are its own partial
        if layer < self.broadcast_delay:
            return "sum" if self.use_early_comm else "local"
        on = self.use_attention_comm if kind == "attention" else self.use_mlp_comm
        return "delayed" if on else "local"

    def is_awaited(self, layer: int, kind: Kind) -> bool:
        """Whether the layer's partials of this kind arrive on the other lanes in a later layer."""
        later = layer + self.broadcast_delay
        return later < self.num_hidden_layers and self.exchange(later, kind) == "delayed"

    def changes_rest(self, layers: range) -> bool:
        """Whether what each lane's residual holds for itself alone differs before and after these layers.

        Partial outputs under way apart; model/segments.py says what that is.
        """
        for layer, kind in product(layers, KINDS):
            exchange = self.exchange(layer, kind)
            if exchange == "delayed" and self.exchange(layer - self.broadcast_delay, kind) != "delayed":
                return True
            if exchange != "sum" and not self.is_awaited(layer, kind):
                return True
        return False

    # Costs

    def _block_matmul_weights(self) -> int:
        queries = self.hidden_size * self.hidden_size
        keys_and_values = 2 * self.num_key_value_heads * self.head_dim * self.hidden_size
        swiglu = 3 * self.hidden_size * self.intermediate_size
        return queries + keys_and_values + queries + swiglu  # wo is as large as wq

    def _head_weights(self) -> int:
        width = self.hidden_size * (self.num_lanes if self.lm_head_type == "lane" else 1)
        return self.vocab_size * width

    def num_parameters(self) -> int:
        """Trainable parameters, a tied matrix counted once."""
        scale = self.hidden_size * (1 if self.replicated_rmsn_scale else self.num_lanes)
        final_scale = self.hidden_size if self.pre_norm_lane_agg else scale
        blocks = self.num_hidden_layers * (self._block_matmul_weights() + 2 * scale)
        head = 0 if self.tie_word_embeddings else self._head_weights()
        return self.vocab_size * self.hidden_size + blocks + final_scale + head

    def part_parameters(self, processes: int) -> int:
        """Parameters that one of so many processes holds when they share the lanes to decode: its lanes, one
        slice of the vocabulary's embedding and head (the largest), and the norms' scales that all lanes share."""
        scale = self.hidden_size * (1 if self.replicated_rmsn_scale else self.num_lanes // processes)
        final_scale = self.hidden_size if self.pre_norm_lane_agg else scale
        blocks = self.num_hidden_layers * (self._block_matmul_weights() // processes + 2 * scale)
        tokens = -(-self.vocab_size // processes)
        head = 0 if self.tie_word_embeddings else tokens * (self._head_weights() // self.vocab_size)
        if self.lm_head_type == "vocab_parallel":
            head = self._head_weights() // processes
        return tokens * self.hidden_size + blocks + final_scale + head

    def attended_keys(self, seq_len: int, window: int | None) -> float:
        """Keys that a token attends to, averaged over one document of seq_len tokens."""
        if window is None or window >= seq_len:
            return (seq_len + 1) / 2
        return window - window * (window - 1) / (2 * seq_len)

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations to train on one token of a document of seq_len tokens.

        Counted: two per weight and token in every matrix multiplication (head included, embedding look-up
        not), and in attention two per element of the query-key and of the score-value products, for just
        those pairs that the causal and sliding-window masks allow. The backward pass is twice the forward.
        Norms, rotation, softmax, sums over lanes and recomputed activations are left out.
        """
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        weights = self.num_hidden_layers * self._block_matmul_weights() + self._head_weights()
        keys = sum(self.attended_keys(seq_len, self.window(i)) for i in range(self.num_hidden_layers))
        return round(3 * (2 * weights + 4 * self.hidden_size * keys))

    def kv_bytes(self, context: int, bytes_per_element: int = 2) -> int:
        """Bytes of one sequence's keys and values; a sliding-window layer keeps no more than its window."""
        slots = sum(min(context, self.window(i) or context) for i in range(self.num_hidden_layers))
        return 2 * self.num_key_value_heads * self.head_dim * slots * bytes_per_element

    def decode_bytes(self, bytes_per_element: int = 2) -> int:
        """Bytes of weights read to decode one token: all but the embedding table, of which it is one row."""
        unread = 0 if self.tie_word_embeddings else (self.vocab_size - 1) * self.hidden_size
        return (self.num_parameters() - unread) * bytes_per_element


def segment_length(policy: str) -> int | None:
    """Layers of a segment in the checkpointing policy "segments:N"; None for "none" and "selective".

    model/recompute.py says what they mean. Raises ValueError for anything else.
    """
    name, _, number = policy.partition(":")
    if policy in ("none", "selective"):
        return None
    if name != "segments" or not number.isdecimal() or int(number) < 1:
        raise ValueError(
            f"{policy!r} must be none, selective or segments:N, N layers computed again together"
        )
    return int(number)


def size_names() -> list[str]:
    """Names that load_size knows, in order of their parameter counts."""
    names = [path.stem for path in SIZES_DIR.glob("*.yaml")]
    return sorted(names, key=lambda name: (load_size(name).num_parameters(), name))


def load_size(name: str) -> LaneformerConfig:
    """Read configs/model/<name>.yaml; raises ValueError for an unknown name or an invalid file."""
    path = SIZES_DIR / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in SIZES_DIR.glob("*.yaml")))
        raise ValueError(f"unknown model size {name!r}; configs/model has: {known}")
    mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        return LaneformerConfig.from_dict(mapping)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
