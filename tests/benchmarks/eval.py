"""Scoring speed: ours against one sequence at a time and against lm-eval, on the same tokens and model.

    python tests/benchmarks/eval.py [--data ../shared/data/core] [--items 16] [--json FILE]

All three score the same spans of the same items with one Laneformer of random weights, and their scores are
compared. lm-eval takes part where it can be imported (`pip install lm-eval transformers`, in an environment of
its own that also sees this one): its HFLM gets the model behind transformers' interface and does the batching,
forward passes and log-probabilities; prompts and tokenisation, which it would also do, are left out for all.
Times are CPU seconds of this process, so that a busy machine does not distort the ratio.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data_mixtures.tokenizer import Tokenizer, train_tokenizer  # noqa: E402
from eval.adapter import LaneformerScorer  # noqa: E402
from eval.core_prompts import DclmRules, Span  # noqa: E402
from eval.core_tasks import CORE, TaskData, load_task, subset  # noqa: E402
from model.laneformer import Laneformer, build_model  # noqa: E402
from tests.architectures import architecture  # noqa: E402

TASKS = (
    "hellaswag",
    "arc_easy",
    "arc_challenge",
    "piqa",
    "boolq",
    "commonsense_qa",
    "openbook_qa",
    "winogrande",
)
TASKS += ("lambada_openai", "coqa")
VOCABULARY = 4096
Scores = list[tuple[float, bool]]


def small_model() -> Laneformer:
    """8M parameters, 2048 tokens of context."""
    sizes = architecture(
        vocab_size=32000,
        hidden_size=128,
        num_hidden_layers=6,
        intermediate_size=512,
        sliding_window=1024,
        swa_layers=(0, 1, 2, 3),
        max_position_embeddings=2048,
    )
    return build_model(sizes).eval()


def tokenizer_of(datasets: Sequence[TaskData], folder: Path) -> Tokenizer:
    texts = [str(value) for data in datasets for item in data.items[:400] for value in item.values()]
    return train_tokenizer(texts, folder / "tokenizer.model", VOCABULARY)


def one_by_one(model: Laneformer) -> Callable[[Sequence[Span]], Scores]:
    @torch.inference_mode()
    def score(spans: Sequence[Span]) -> Scores:
        found = []
        for span in spans:
            logits = model(torch.tensor([span.tokens]))[0, span.start - 1 : -1].log_softmax(-1)
            targets = torch.tensor(span.tokens[span.start :])
            hits = logits.argmax(-1) == targets
            found.append((logits.gather(1, targets[:, None]).sum().item(), bool(hits.all())))
        return found

    return score


def ours(model: Laneformer, tokenizer: Tokenizer, share: bool) -> Callable[[Sequence[Span]], Scores]:
    scorer = LaneformerScorer(model, tokenizer, share=share)
    return lambda spans: [(-score.nll, score.greedy) for score in scorer.score(spans)]


def lm_eval(model: Laneformer, batch_size: int) -> Callable[[Sequence[Span]], Scores]:
    """lm-eval's scoring of token sequences, with its own cache of one-token endings on."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    outputs: Any = importlib.import_module("transformers.modeling_outputs")
    harness: Any = importlib.import_module("lm_eval.models.huggingface").HFLM

    class Wrapped(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig())
            self.inner = model

        def tie_weights(self, *args: Any, **kwargs: Any) -> None:
            pass

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return outputs.CausalLMOutput(logits=self.inner(input_ids))

    words = tokenizers.models.WordLevel({"<unk>": 0, "</s>": 2}, unk_token="<unk>")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    length = model.sizes.max_position_embeddings
    engine = harness(
        pretrained=Wrapped(), tokenizer=fast, batch_size=batch_size, max_length=length, device="cpu"
    )

    def score(spans: Sequence[Span]) -> Scores:
        requests = [
            (("", ""), list(span.tokens[: span.start]), list(span.tokens[span.start :])) for span in spans
        ]
        return engine._loglikelihood_tokens(requests, disable_tqdm=True)

    return score


def measure(engines: dict[str, Callable[[Sequence[Span]], Scores]], spans: Sequence[Span]) -> dict[str, Any]:
    """CPU seconds of each engine, and the largest difference of its scores from one-by-one scoring."""
    row: dict[str, Any] = {}
    scores: dict[str, Scores] = {}
    for name, engine in engines.items():
        started = time.process_time()
        scores[name] = engine(spans)
        row[name] = time.process_time() - started
    plain = scores["one by one"]
    for name, found in scores.items():
        pairs = list(zip(found, plain, strict=True))
        row[f"{name}, max |Δ| per token"] = max(
            abs(a[0] - b[0]) / (len(span.tokens) - span.start)
            for (a, b), span in zip(pairs, spans, strict=True)
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "core")
    parser.add_argument("--items", type=int, default=16, help="of each task")
    parser.add_argument("--batch-size", type=int, default=8, help="of lm-eval")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    datasets = [data for name in TASKS if (data := load_task(CORE[name], options.data))]
    model = small_model()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_of(datasets, Path(folder))
        engines = {
            "one by one": one_by_one(model),
            "ours, nothing shared": ours(model, tokenizer, share=False),
            "ours": ours(model, tokenizer, share=True),
        }
        try:
            engines["lm-eval"] = lm_eval(model, options.batch_size)
        except ImportError as error:
            print(f"lm-eval takes no part: {error}", file=sys.stderr)
        encoder = LaneformerScorer(model, tokenizer).encoder
        for data in datasets:
            shots = DclmRules().shots(data, None)
            items = subset(data, options.items)
            prompts = [DclmRules().prompt(data, item, shots[item], encoder) for item in items]
            spans = [span for prompt in prompts for span in prompt.spans]
            row = {"task": data.task.name, "items": len(items), "sequences": len(spans)}
            row["tokens"] = sum(len(span.tokens) for span in spans)
            rows.append(row | measure(engines, spans))
            print(row["task"], {name: round(rows[-1][name], 2) for name in engines}, file=sys.stderr)
    total = {key: sum(row[key] for row in rows) for key in ("items", "sequences", "tokens", *engines)}
    worst = {key: max(row[key] for row in rows) for key in rows[0] if "max" in key}
    rows.append({"task": "all", **total, **worst})
    print_table(rows, list(engines))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def print_table(rows: list[dict[str, Any]], engines: list[str]) -> None:
    """Items per CPU second, how many times faster than each other engine ours is, and the largest difference."""
    others = [name for name in engines if name != "ours"]
    head = ["task", "sequences", "tokens", *(f"{name}, items/s" for name in engines)]
    head += [*(f"ours ÷ {name}" for name in others), "ours, max |Δ| per token"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        cells = [row["task"], f"{row['sequences']:,}", f"{row['tokens']:,}"]
        cells += [f"{row['items'] / row[name]:.2f}" for name in engines]
        cells += [f"{row[name] / row['ours']:.1f}×" for name in others]
        cells.append(f"{row['ours, max |Δ| per token']:.1e}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
