"""Data benchmarks: the loader against others on the same tokens, the plan of 6T tokens, tokenisation speed.

    python tests/benchmarks/data.py [--json FILE]

Compared where importable: TorchTitan's interleaved loader (a dependency) and OLMo-core's composable loader
(`pip install --target DIR ai2-olmo-core …`, then PYTHONPATH=DIR), HF tokenizers (`tokenizers`).
Every loader gets the same documents as token ids, so tokenisation is not part of its figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data_mixtures.loader import MixtureLoader  # noqa: E402
from data_mixtures.mixture import build_mixture  # noqa: E402
from data_mixtures.recipe import DataConfig  # noqa: E402
from data_mixtures.shards import ShardWriter, token_dtype, write_manifest  # noqa: E402
from data_mixtures.token_stream import TokenStream  # noqa: E402

SEQ_LEN = 1024
BATCH = 8  # sequences of a global batch
SEQUENCES = 10_000
WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}
TOKENS_PER_SOURCE = 13_000_000  # enough that nothing has to come twice
BOS, EOS, FIRST, RANGE = 1, 2, 3, 10_000  # tokens of source s are FIRST + s·RANGE + …
Sequence = bytes


class Loader(Protocol):
    """One way to load the sources; `batches` gives this rank's part of each global batch."""

    name: str

    def batches(
        self, rank: int, world_size: int, state: Any = None, workers: int = 0
    ) -> Iterator[np.ndarray]: ...

    def state(self, rank: int) -> Any: ...


# --- the same documents for all


def write_sources(root: Path) -> None:
    rng = np.random.default_rng(0)
    for s, source in enumerate(WEIGHTS):
        directory = root / source / "train"
        directory.mkdir(parents=True)
        writer = ShardWriter(directory, "shard-00000", token_dtype(1 << 16))
        while writer.tokens < TOKENS_PER_SOURCE:
            length = int(rng.exponential(800)) + 1
            body = rng.integers(FIRST + s * RANGE, FIRST + (s + 1) * RANGE, length)
            writer.add([BOS, *body.tolist(), EOS], 4 * length)
        write_manifest(
            directory,
            source=source,
            split="train",
            origin={},
            tokenizer_sha256="-",
            vocab_size=1 << 16,
            shards=[writer.close()],
            dropped={},
        )


def source_of(sequence: np.ndarray) -> int:
    return int((sequence.max() - FIRST) // RANGE)


# --- the loaders


class Ours:
    name = "this project"

    def __init__(self, root: Path) -> None:
        self._root = root
        config = DataConfig(
            name="bench", root=str(root), tokens=2 * SEQUENCES * SEQ_LEN, weights=WEIGHTS, max_epochs=99
        )
        self._mixture = build_mixture(config, SEQ_LEN)
        self._loaders: dict[int, MixtureLoader] = {}

    def batches(
        self, rank: int, world_size: int, state: Any = None, workers: int = 0
    ) -> Iterator[np.ndarray]:
        loader = self._loaders[rank] = MixtureLoader(
            self._mixture,
            root=self._root,
            rank=rank,
            world_size=world_size,
            local_batch_size=BATCH // world_size,
            seq_len=SEQ_LEN,
            prefetch=max(1, workers),
        )
        if state is not None:
            loader.load_state_dict(state)
        return (inputs["input"].numpy() for inputs, _ in loader)

    def state(self, rank: int) -> Any:
        return self._loaders[rank].state_dict()


class Titan:
    """TorchTitan's interleaved text loader; its tokenizer looks the stored ids up."""

    name = "torchtitan 0.3.0 interleaved"

    def __init__(self, root: Path) -> None:
        import datasets
        from torchtitan.hf_datasets import DatasetConfig, text_datasets

        self._documents: list[list[int]] = []
        for source in WEIGHTS:
            stream = TokenStream(root / source / "train")
            tokens = stream.read(0, stream.tokens)[0]
            first = len(self._documents)
            self._documents += [part.tolist() for part in np.split(tokens, stream.document_offsets(0)[1:-1])]
            rows = datasets.Dataset.from_dict({"text": [str(i) for i in range(first, len(self._documents))]})
            text_datasets.DATASETS[f"bench_{source}"] = DatasetConfig(
                path="-", loader=lambda _, rows=rows: rows, sample_processor=lambda sample: sample["text"]
            )
        self._loaders: dict[int, Any] = {}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._documents[int(text)]

    def batches(
        self, rank: int, world_size: int, state: Any = None, workers: int = 0
    ) -> Iterator[np.ndarray]:
        from torchtitan.hf_datasets.text_datasets import HFDataSource, InterleavedHuggingFaceTextDataLoader

        sources = [HFDataSource(dataset=f"bench_{s}", infinite=True, weight=w) for s, w in WEIGHTS.items()]
        loader = self._loaders[rank] = InterleavedHuggingFaceTextDataLoader(
            InterleavedHuggingFaceTextDataLoader.Config(sources=sources, num_workers=workers),
            dp_world_size=world_size,
            dp_rank=rank,
            tokenizer=self,  # type: ignore[arg-type]
            seq_len=SEQ_LEN,
            local_batch_size=BATCH // world_size,
        )
        if state is not None:
            loader.load_state_dict(state)
        return (inputs["input"].numpy() for inputs, _ in loader)

    def state(self, rank: int) -> Any:
        return self._loaders[rank].state_dict()


class Olmo:
    """OLMo-core's composable loader: a mix of chunked sources, shuffled as one."""

    name = "OLMo-core composable"

    def __init__(self, root: Path) -> None:
        from olmo_core.data import TokenizerConfig  # pyright: ignore[reportMissingImports]
        from olmo_core.data.composable import (  # pyright: ignore[reportMissingImports]
            ConcatAndChunkInstanceSource,
            MixingInstanceSource,
            NumpyDocumentSource,
        )

        self._work = root / "olmo"
        self._tokenizer = TokenizerConfig(
            vocab_size=1 << 16, eos_token_id=EOS, pad_token_id=0, bos_token_id=BOS
        )
        common: dict[str, Any] = {"work_dir": self._work}
        specs = []
        for source, weight in WEIGHTS.items():
            documents = NumpyDocumentSource(
                source_paths=[str(root / source / "train" / "shard-00000.bin")],
                dtype=np.uint16,
                tokenizer=self._tokenizer,
                **common,
            )
            chunked = ConcatAndChunkInstanceSource(documents, sequence_length=SEQ_LEN, **common)
            specs.append(MixingInstanceSource.Spec(source=chunked, ratio=weight, max_repetition_factor=9.0))
        self._mixed = MixingInstanceSource(*specs, num_instances=2 * SEQUENCES, seed=0, **common)
        self._loaders: dict[int, Any] = {}

    def batches(
        self, rank: int, world_size: int, state: Any = None, workers: int = 0
    ) -> Iterator[np.ndarray]:
        from olmo_core.data import DataCollator  # pyright: ignore[reportMissingImports]
        from olmo_core.data.composable import ComposableDataLoader  # pyright: ignore[reportMissingImports]

        loader = self._loaders[rank] = ComposableDataLoader(
            self._mixed,
            collator=DataCollator(pad_token_id=0),
            tokenizer=self._tokenizer,
            work_dir=self._work,
            global_batch_size=BATCH * SEQ_LEN,
            dp_world_size=world_size,
            dp_rank=rank,
            seed=0,
            num_workers=workers,
            generate_doc_lengths=True,
            display_source_visualization=False,
        )
        if state is not None:
            loader.load_state_dict(state)
        loader.reshuffle(epoch=1)
        return (batch["input_ids"].numpy() for batch in loader)

    def state(self, rank: int) -> Any:
        return self._loaders[rank].state_dict()


# --- what is measured


def global_batches(
    loader: Loader, world_size: int, count: int, states: Any = None, workers: int = 0
) -> list[list[np.ndarray]]:
    """`count` global batches, each the parts of all ranks joined."""
    ranks = [
        loader.batches(r, world_size, states and states[r % len(states)], workers) for r in range(world_size)
    ]
    return [[row for part in ranks for row in next(part)] for _ in range(count)]


def measure(loader: Loader) -> dict[str, Any]:
    batches = global_batches(loader, 1, SEQUENCES // BATCH)
    drawn = np.array([source_of(row) for batch in batches for row in batch])
    n = np.arange(1, len(drawn) + 1)
    deviation = max(
        float(np.abs(np.cumsum(drawn == s) - n * weight).max()) for s, weight in enumerate(WEIGHTS.values())
    )
    twice = global_batches(loader, 1, 1000 // BATCH, workers=2)
    distinct = {row.tobytes() for batch in twice for row in batch}
    return {
        "loader": loader.name,
        "tokens_per_cpu_second": throughput(loader),
        "worst_deviation_in_sequences": round(deviation, 2),
        "duplicates_in_first_1000_with_2_workers": 1000 // BATCH * BATCH - len(distinct),
        "resume_2_to_4_ranks": resume(loader),
    }


def throughput(loader: Loader) -> float:
    """Tokens per CPU second of this process, all its threads included, the second time over the same batches."""
    rate = 0.0
    for _ in range(2):
        batches = loader.batches(0, 1)
        next(batches)
        started = time.process_time()
        for _ in range(600):
            next(batches)
        rate = 600 * BATCH * SEQ_LEN / (time.process_time() - started)
    return rate


def resume(loader: Loader) -> str:
    """Whether 20 batches on 2 ranks and 20 more on 4 are those of a run on 2 ranks throughout."""
    whole = global_batches(loader, 2, 40)
    ranks = [loader.batches(r, 2) for r in range(2)]
    for _ in range(20):
        for part in ranks:
            next(part)
    states = [loader.state(r) for r in range(2)]
    try:
        rest = global_batches(loader, 4, 20, states)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0][:70]}"
    same = [
        sorted(r.tobytes() for r in a) == sorted(r.tobytes() for r in b)
        for a, b in zip(whole[20:], rest, strict=True)
    ]
    return "identical batches" if all(same) else f"{same.count(False)} of 20 batches differ"


def compare_loaders() -> list[dict[str, Any]]:
    kinds: list[Callable[[Path], Loader]] = [Ours, Titan]
    if importlib.util.find_spec("olmo_core"):
        kinds.append(Olmo)
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        results = []
        for kind in kinds:
            with contextlib.redirect_stdout(sys.stderr):
                results.append(measure(kind(Path(folder))))
    return results


def measure_plan() -> dict[str, float]:
    """The plan of the test of six trillion tokens, in a fresh process."""
    from tests.unit.test_data_mixture import SIX_TRILLION

    printed = subprocess.run(
        [sys.executable, "-c", SIX_TRILLION], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    seconds, access, megabytes = map(float, printed.split())
    return {"start_up_seconds": seconds, "random_access_ms": access * 1e3, "memory_megabytes": megabytes}


def compare_tokenisation() -> list[dict[str, Any]]:
    """Tokens per second over the standard library's code and prose, by what does the work."""
    from data_mixtures import smoke_corpus
    from data_mixtures.tokenizer import Tokenizer, train_tokenizer

    texts = [text for _, text in [*smoke_corpus.code(), *smoke_corpus.prose()]] * 4  # 48 MB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(texts[::4], folder / "tokenizer.model")
        for k in range(8):
            lines = (json.dumps({"text": text}) + "\n" for text in texts[k::8])
            (folder / f"{k}.jsonl").write_text("".join(lines))
        tokenizer = Tokenizer(folder / "tokenizer.model")
        rows = [
            _timed("SentencePiece, batches, 1 core", lambda: sum(map(len, tokenizer.encode_batch(texts))))
        ]
        rows += [
            _timed(f"prepare, workers={workers}", lambda workers=workers: _prepare(folder, workers))
            for workers in (1, 2)
        ]
        rows.append(
            _timed("datasets + SentencePiece loop, 1 core", lambda: _datasets_loop(folder, tokenizer))
        )
        if importlib.util.find_spec("tokenizers"):
            rows.append(_hf_tokenizers(texts))
    return rows


def _timed(name: str, work: Callable[[], int]) -> dict[str, Any]:
    """Speed by the clock, and by the CPU time of this process and its children (busy machines slow the
    clock).
    """
    before, started = os.times(), time.perf_counter()
    tokens = work()
    after, seconds = os.times(), time.perf_counter() - started
    cpu_seconds = sum(after[:4]) - sum(before[:4])
    return {
        "what": name,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "tokens": tokens,
    }


def _prepare(folder: Path, workers: int) -> int:
    from data_mixtures.shards import read_manifest

    (folder / "text.yaml").write_text(
        "kind: jsonl\npath: '*.jsonl'\ncategory: code\nlicence: PSF-2.0\ncolumns: {text: text}\n"
    )
    root = folder / f"out{workers}"
    command = [
        sys.executable,
        "-m",
        "data_mixtures",
        "prepare",
        f"source={folder / 'text.yaml'}",
        f"root={root}",
    ]
    command += [f"tokenizer={folder / 'tokenizer.model'}", f"workers={workers}"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return read_manifest(root / "text" / "train")["tokens"]


def _datasets_loop(folder: Path, tokenizer: Any) -> int:
    import datasets

    rows = datasets.load_dataset("json", data_files=str(folder / "*.jsonl"), split="train", streaming=True)
    return sum(len(tokenizer.encode(row["text"])) for row in rows)


def _hf_tokenizers(texts: list[str]) -> dict[str, Any]:
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(texts[::4], vocab_size=4096)
    return _timed(
        "HF tokenizers, byte-level BPE of as many pieces, 1 core",
        lambda: sum(len(encoded.ids) for encoded in model.encode_batch(texts)),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value / 1e6:.2f}M" if value >= 1e5 else f"{value:.3g}"
        return str(value)

    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([cell(row[key]) for key in head] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    results = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "loaders": compare_loaders(),
        "plan_of_6T_tokens": measure_plan(),
        "tokenisation": compare_tokenisation(),
    }
    print(
        table(results["loaders"]),
        table([results["plan_of_6T_tokens"]]),
        table(results["tokenisation"]),
        sep="\n\n",
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
