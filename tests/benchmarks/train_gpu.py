"""How fast one GPU trains, and what each optimisation gives.

    python tests/benchmarks/train_gpu.py [--size 2b] [--sequences 2] [--sequence 4096] [--steps 10] [--json FILE]
    python tests/benchmarks/train_gpu.py --device cpu --size smoke --sequences 1 --sequence 128     # a dry run

Synthetic tokens, one rank, the model as training builds it: FSDP's mixed precision, fused AdamW, clipping. Each row is
one setting of configs/parallel's keys; a row names what it changes over the one above. Columns: tokens per second
(median step), model FLOPs utilisation, peak memory beside train/estimate.py's, and wide passes: how often a step reads
or writes a tensor as large as the residual streams (L, T, D), for each layer, counted from a profile of one step.

A row that can't run says why. On a CPU the table shows that the script works; its figures say nothing about GPUs. It
was not run on a GPU so far.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from train.cli import single_process_environment  # noqa: E402
from train.config import RunConfig, compose  # noqa: E402
from train.device import prepare_torchtitan  # noqa: E402
from train.estimate import estimate  # noqa: E402
from train.run_dir import RunDir  # noqa: E402

PLAIN = {"kernels": "torch", "compile": "false", "activation_checkpoint": "none", "loss_chunks": "1"}
ROWS: tuple[tuple[str, dict[str, str]], ...] = (  # what is changed, over all rows above unless it says "only"
    ("plain operations", PLAIN),
    ("loss in 8 chunks", {"loss_chunks": "8"}),
    ("adding and norm in one kernel", {"kernels": "triton"}),
    ("SwiGLU computed again", {"activation_checkpoint": "selective"}),
    ("blocks compiled", {"compile": "true"}),
    ("compiled without the kernel", {"kernels": "torch"}),
    ("segments of 5 layers, with the kernel", {"kernels": "triton", "activation_checkpoint": "segments:5"}),
    ("float8, selective again", {"activation_checkpoint": "selective", "float8": "true"}),
)
DENSE = ("dense twin, compiled, selective", {"kernels": "torch", "float8": "false"})
OUTPUTS = {"laneformer::lane_add": 1, "laneformer::lane_add_backward": 2}  # wide tensors written
REDUCTIONS = ("aten::sum", "aten::mean", "aten::linalg_vector_norm")
VIEWS = (
    "view",
    "reshape",
    "transpose",
    "expand",
    "as_strided",
    "slice",
    "select",
    "split",
    "chunk",
    "detach",
    "t",
)
VIEWS += (
    "permute",
    "alias",
    "narrow",
    "unflatten",
    "flatten",
    "_unsafe_view",
    "unbind",
    "squeeze",
    "unsqueeze",
)
VIEWS += (
    "split_with_sizes",
    "_reshape_alias",
    "contiguous",
    "to",
    "empty_like",
    "new_empty",
    "resolve_conj",
    "resolve_neg",
)


def configuration(options: argparse.Namespace, settings: dict[str, str], dense: bool) -> RunConfig:
    gpu = options.device == "cuda"
    settings = settings | {"param_dtype": "bfloat16" if gpu else "float32"}
    return compose(
        [
            "experiment=phase1",
            f"model={options.size}{'_dense' if dense else ''}",
            "cluster=local",
            f"cluster.device={options.device}",
            f"train.seq_len={options.sequence}",
            f"train.local_batch_size={options.sequences}",
            f"train.global_batch_size={options.sequences}",
            "checkpoint.asynchronous=false",
            *(f"parallel.{key}={value}" for key, value in settings.items()),
        ]
    )


def training_step(config: RunConfig, folder: Path) -> Callable[[], None]:
    """A step of a model built as the trainer builds it."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_

    from train.titan import trainer_config

    titan: Any = trainer_config(config, RunDir(folder), None)
    device = torch.device(config.cluster.device)
    dims = ParallelDims.from_config(titan.parallelism, 1)
    with torch.device("meta"):
        model = titan.model_spec.model.build()
    titan.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=titan.training,
        parallelism=titan.parallelism,
        compile_config=titan.compile,
        ac_config=None,
        dump_folder=os.fspath(folder),
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    loss_fn = titan.loss.build(compile_config=titan.compile)
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (config.train.local_batch_size, config.train.seq_len)
    tokens = torch.randint(0, config.model.vocab_size, shape, device=device)
    labels = tokens.roll(-1, 1)
    positions = torch.arange(shape[1], device=device).expand(shape).contiguous()
    count = torch.tensor(float(tokens.numel()), device=device)

    def step() -> None:
        masks = model.get_attention_masks(positions)
        loss, _ = loss_fn(model(tokens, positions, masks), labels, count)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wide_reads(event: Any, elements: int) -> int:
    shapes = [shape for shape in event.input_shapes or [] if shape and all(type(n) is int for n in shape)]
    return sum(math.prod(shape) == elements for shape in shapes)


def _computes(event: Any, elements: int) -> bool:
    """Whether an operation on the CPU reads or writes wide tensors itself, rather than in an operation it calls."""

    def computing(name: str) -> bool:
        return name.startswith("aten::") and name.removeprefix("aten::") not in VIEWS

    inner = any(computing(child.name) and _wide_reads(child, elements) for child in event.cpu_children)
    return computing(event.name) and not inner


def wide_passes(events: Iterable[Any], elements: int, on_gpu: bool) -> int:
    """Tensors of exactly `elements` numbers that the operations of a profile read or wrote.

    A kernel from Triton names all its tensors; an operation of torch names what it reads, and what it writes is as
    large as the largest of that, but for reductions and matrix products.
    """
    passes = 0
    for event in events:
        name, shapes = event.name, [shape for shape in event.input_shapes or [] if shape]
        reads = _wide_reads(event, elements)
        if not (event.kernels if on_gpu else _computes(event, elements)):
            continue
        writes = 0
        if name in OUTPUTS:
            writes = OUTPUTS[name]
        elif name in ("aten::bmm", "aten::mm") and len(shapes) == 2:
            writes = math.prod(shapes[0][:-1]) * shapes[1][-1] == elements
        elif name == "aten::baddbmm":
            writes = math.prod(shapes[0]) == elements
        elif (
            name.startswith("aten::") and name not in REDUCTIONS and not name.endswith(("copy_", "bmm", "mm"))
        ):
            writes = reads > 0
        passes += reads + writes
    return passes


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    gpu = config.cluster.device == "cuda"
    torch._dynamo.reset()
    tokens = config.train.local_batch_size * config.train.seq_len
    with tempfile.TemporaryDirectory() as folder:
        step = training_step(config, Path(folder))
        for _ in range(3):
            step()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() if gpu else None
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if gpu else []
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiled:
            step()
    elements = config.model.num_lanes * tokens * config.model.hidden_size
    row = {
        "tokens_per_second": tokens / statistics.median(seconds),
        "seconds": [min(seconds), statistics.median(seconds), max(seconds)],
        "peak_bytes": peak,
        "estimated_bytes": estimate(config).peak,
        "wide_passes_per_layer": wide_passes(profiled.events() or [], elements, gpu)
        / config.model.num_hidden_layers,
    }
    if gpu:
        from torchtitan.tools.utils import get_peak_flops

        flops = row["tokens_per_second"] * config.model.flops_per_token(config.train.seq_len)
        row["mfu"] = flops / get_peak_flops(torch.cuda.get_device_name())
    return row


def measured_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, settings = [], {}
    for name, change in (*ROWS, DENSE):
        settings = settings | change
        row: dict[str, Any] = {"row": name, **settings}
        if options.device == "cpu" and (settings["kernels"] == "triton" or settings.get("float8") == "true"):
            row["not_run"] = "needs a GPU"
        elif options.device == "cpu" and settings["compile"] == "true" and not options.compile_on_cpu:
            row["not_run"] = "compiles for a minute: --compile-on-cpu"
        else:
            try:
                row |= measure(configuration(options, settings, dense=name == DENSE[0]), options.steps)
            except torch.OutOfMemoryError:
                row["not_run"] = "out of memory"
        rows.append(row)
        print(f"{name}: {row.get('not_run', 'measured')}", file=sys.stderr, flush=True)
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "| | tokens/s | over the row above | MFU | peak GiB | estimated | wide passes a layer |\n"
        + "|---" * 7
        + "|"
    )
    before = None
    for row in rows:
        if "not_run" in row:
            print(f"| {row['row']} | not run: {row['not_run']} | | | | | |")
            continue
        speed, peak, mfu = row["tokens_per_second"], row["peak_bytes"], row.get("mfu")
        cells = [row["row"], f"{speed:,.0f}", f"{speed / before:.2f}×" if before else ""]
        cells += [f"{100 * mfu:.1f} %" if mfu else "", f"{peak / 2**30:.2f}" if peak else ""]
        cells += [f"{row['estimated_bytes'] / 2**30:.2f}", f"{row['wide_passes_per_layer']:.1f}"]
        print("| " + " | ".join(cells) + " |")
        before = speed


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", default="2b", help="of configs/model, with a _dense twin")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=4096, help="tokens")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile-on-cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --size smoke is a dry run")
    prepare_torchtitan(options.device)
    alone = not dist.is_initialized()
    if alone:
        os.environ.update(single_process_environment())
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    try:
        rows = measured_rows(options)
    finally:
        if alone:
            dist.destroy_process_group()
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
