"""Training speed on the CPU: ours against the published form of lanes and against plain Llamas of equal size.

    python tests/benchmarks/train.py [--sizes smoke 125m] [--rounds 7] [--json FILE] [--quick]

One step is a forward pass, the cross entropy and a backward pass in float32, on the same random tokens for all. The
optimizer is left out: all have equally many parameters and the same AdamW. Engines take turns, and what is compared
are CPU seconds of this one-threaded process in the same round, so that other work on the machine falls on all alike.
A ratio is the median of its rounds' ratios; beside it stand the quartiles.

    ours            lanes, model/laneformer.py
    ours, dense     its dense twin: one lane, no delay, as many parameters
    einsum          the published form of the lanes, tests/benchmarks/einsum_lanes.py
    torchtitan      the dense twin in torchtitan's own Llama
    transformers    the dense twin in transformers' LlamaForCausalLM

Compiled means torch.compile of each block by itself, as training does. The second table is the split of a training
step's time in the pipeline's trainer. --quick runs a small size once, uncompiled, to see that everything works.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from train.device import prepare_torchtitan  # noqa: E402

prepare_torchtitan("cpu")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock  # noqa: E402

from model.config import LaneformerConfig, load_size  # noqa: E402
from model.laneformer import build_model  # noqa: E402
from model.parallelize import configure_compiler  # noqa: E402
from tests.benchmarks.einsum_lanes import EinsumLaneformer  # noqa: E402
from tests.runs import train  # noqa: E402
from tests.tiny import tiny_config, write_data  # noqa: E402
from train.loss import row_losses  # noqa: E402

TOKENS = {"smoke": (4, 256), "125m": (1, 256)}  # batch, sequence
RATIOS = (  # time of the first over time of the second, and the goal
    ("einsum", "ours", "at least 2 uncompiled, 1.15 compiled"),
    ("ours", "ours, dense", "at most 1.30 compiled"),
    ("ours, dense", "torchtitan", "at most 1.05"),
    ("ours, dense", "transformers", ""),
)
Step = Callable[[], None]


def titan_llama(sizes: LaneformerConfig) -> nn.Module:
    """The dense twin as torchtitan builds it, with its attention for causal masks."""
    width, heads = sizes.hidden_size, sizes.num_attention_heads
    normal = {"weight": lambda w: nn.init.normal_(w, std=width**-0.5)}
    ones = {"weight": nn.init.ones_}
    norm = RMSNorm.Config(normalized_shape=width, eps=sizes.norm_eps, param_init=ones)
    block = Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=make_gqa_config(
            dim=width,
            n_heads=heads,
            n_kv_heads=sizes.num_key_value_heads,
            wqkv_param_init=normal,
            wo_param_init=normal,
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(dim=sizes.head_dim, max_seq_len=sizes.max_position_embeddings),
        ),
        feed_forward=make_ffn_config(
            dim=width,
            hidden_dim=sizes.intermediate_size,
            w1_param_init=normal,
            w2w3_param_init=normal,
        ),
    )
    config = Llama3Model.Config(
        dim=width,
        vocab_size=sizes.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=sizes.vocab_size, embedding_dim=width, param_init={"weight": nn.init.normal_}
        ),
        norm=norm,
        lm_head=Linear.Config(in_features=width, out_features=sizes.vocab_size, param_init=normal),
        layers=[block] * sizes.num_hidden_layers,
    )
    model = config.build()
    model.init_states()
    return model


def hf_llama(sizes: LaneformerConfig) -> nn.Module:
    """The dense twin as transformers builds it, with torch's fused attention."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        rms_norm_eps=sizes.norm_eps,
        max_position_embeddings=sizes.max_position_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def engines(size: str) -> dict[str, nn.Module]:
    lanes, dense = load_size(size), load_size(f"{size}_dense")
    ours = build_model(lanes)
    found = {
        "ours": ours,
        "ours, dense": build_model(dense),
        "einsum": EinsumLaneformer(lanes).load(ours),
        "torchtitan": titan_llama(dense),
        "transformers": hf_llama(dense),
    }
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in found.items()}
    assert len(set(counts.values())) == 1, counts
    return found


def blocks(model: nn.Module) -> list[nn.Module]:
    layers: Any = model.model.layers if hasattr(model, "model") else model.layers  # pyright: ignore[reportAttributeAccessIssue]
    return list(layers.values() if isinstance(layers, nn.ModuleDict) else layers)


def step_of(model: nn.Module, batch: int, seq: int) -> Step:
    tokens = torch.randint(0, 1000, (batch, seq), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)

    def step() -> None:
        logits = model(tokens)
        logits = getattr(logits, "logits", logits)
        row_losses(logits, labels)[1].mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each step in each round; every round starts with another engine."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for step in steps.values():  # warm, and compile
        step()
        step()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            begin = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - begin)
    return seconds


def ratio_rows(size: str, form: str, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for above, below, goal in RATIOS:
        ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        row = {"size": size, "form": form, "ratio": f"{above} ÷ {below}", "median": middle}
        times = {"seconds_above": statistics.median(seconds[above])}
        times |= {"seconds_below": statistics.median(seconds[below])}
        rows.append(row | {"low": low, "high": high, "goal": goal} | times)
    return rows


def speed(size: str, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    models = engines(size)
    if compiled:
        torch._dynamo.reset()
        configure_compiler()
        for model in models.values():
            for block in blocks(model):
                block.compile(fullgraph=False)
    batch, seq = TOKENS[size]
    steps = {name: step_of(model, batch, seq) for name, model in models.items()}
    return ratio_rows(size, "compiled" if compiled else "eager", measure(steps, rounds))


def step_split(quick: bool) -> list[dict[str, Any]]:
    """Shares of a training step at the smoke size, averaged over a run that saves asynchronously every 8 steps."""
    steps, batch, seq = (12, 4, 32) if quick else (24, 16, 256)
    words = ["data.max_epochs=1000", "checkpoint.every_steps=8", "metrics.tensorboard=true"]
    words += ["optim.warmup_tokens=0", "optim.decay_tokens=0", f"data.tokens={steps * batch * seq}"]
    words += [
        f"train.seq_len={seq}",
        f"train.global_batch_size={batch}",
        f"train.local_batch_size={min(batch, 8)}",
    ]
    if not quick:
        smoke = replace(load_size("smoke"), vocab_size=384)
        words += [f"model.{key}={value}" for key, value in smoke.to_dict().items()]
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(write_data(Path(folder) / "data"), Path(folder), *words)
        rows = train(config).metric_rows("train")[
            4:-1
        ]  # the first steps allocate, the last one waits for its save
    parts = ("data", "forward_backward", "optimizer", "checkpoint")
    total = sum(row["seconds/step"] for row in rows)
    shares = {part: sum(row[f"seconds/{part}"] for row in rows) / total for part in parts}
    shares["logging and the rest"] = 1 - sum(shares.values())
    found: list[dict[str, Any]] = [{"part": part, "share": share} for part, share in shares.items()]
    typical = statistics.median(row["seconds/step"] for row in rows)
    saves = [row["seconds/checkpoint"] for row in rows if row["step"] % 8 == 0]
    return [
        *found,
        {"part": "an asynchronous save, of one step", "share": statistics.median(saves) / typical},
    ]


def print_ratios(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        spread = f"{row['low']:.2f}–{row['high']:.2f}"
        times = f"{row['seconds_above']:.3f} ÷ {row['seconds_below']:.3f}"
        cells = [row["size"], row["form"], row["ratio"], f"{row['median']:.2f}", spread, row["goal"], times]
        print("| " + " | ".join(cells) + " |", flush=True)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument("--forms", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-split", action="store_true", help="leave out the trainer's time split")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.forms, options.rounds = ["smoke"], ["eager"], 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print("| size | form | time of | ratio | quartiles | goal | seconds |\n|---|---|---|---|---|---|---|")
    for size in options.sizes:
        for form in options.forms:
            found = speed(size, options.rounds, form == "compiled")
            print_ratios(found)
            rows += found
    if not options.no_split:
        split = step_split(options.quick)
        print("\n| part of a training step | share |\n|---|---|")
        for row in split:
            print(f"| {row['part']} | {100 * row['share']:.2f} % |")
        rows += split
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
