"""Models behind one interface: the log-likelihood of the end of a sequence, for many sequences at once.

A checkpoint directory of a run is read as it is, without conversion; a Hugging Face folder goes through
transformers, which is only needed for that. The head is applied to the scored positions alone: over all
positions it would cost as much as a large part of the model.

Shape suffixes: B rows  S nodes of a row  V vocabulary  I inputs of the head  P scored positions
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from data_mixtures.tokenizer import Tokenizer
from eval.core_prompts import Span, TextEncoder
from eval.packing import Row, batches, pack
from eval.results import sha256_file

if TYPE_CHECKING:
    from model.laneformer import Laneformer

CHUNK_ELEMENTS = 2**26  # logits held at once, so that a large vocabulary needs no more than 256 MiB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Score:
    """What a model makes of the scored tokens of one span."""

    nll: float
    """Sum of −log p over the scored tokens, in nats."""
    count: int
    greedy: bool
    """Whether each of them is the most likely one."""

    @property
    def mean(self) -> float:
        """Per token; infinite where no token is scored, so that such an option never wins."""
        return self.nll / self.count if self.count else float("inf")


class Scorer(Protocol):
    @property
    def encoder(self) -> TextEncoder: ...

    def score(self, spans: Sequence[Span]) -> list[Score]:
        """The score of each span, in order."""
        ...


class SentencePieceEncoder:
    """Our tokenizer files. A sequence begins with BOS, as every training document does."""

    def __init__(self, tokenizer: Tokenizer, longest: int):
        self.tokenizer = tokenizer
        self.bos_id = tokenizer.bos_id
        self.longest = longest

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_start(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, bos=True)


class LaneformerScorer:
    """A Laneformer on one device. Rows are trees (eval/packing.py); `share=False` gives one sequence a row."""

    def __init__(
        self, model: Laneformer, tokenizer: Tokenizer, batch_tokens: int | None = None, share: bool = True
    ):
        self.model = model.eval()
        self.sizes = model.sizes
        self.device = next(model.parameters()).device
        self.encoder: TextEncoder = SentencePieceEncoder(tokenizer, self.sizes.max_position_embeddings)
        self.batch_tokens = batch_tokens or default_batch_tokens(self.device)
        self.share = share

    @torch.inference_mode()
    def score(self, spans: Sequence[Span]) -> list[Score]:
        rows = pack(spans, self.sizes.max_position_embeddings, self.share)
        scores: dict[int, Score] = {}
        for batch in batches(rows, self.batch_tokens):
            hidden_BSI = self._hidden(batch)
            numbers = [number for row in batch for number in row.spans]
            where, targets = [], []
            for r, row in enumerate(batch):
                for number, path in zip(row.spans, row.paths, strict=True):
                    span = spans[number]
                    where += [r * hidden_BSI.shape[1] + node for node in path[span.start - 1 :]]
                    targets += span.tokens[span.start :]
            counts = [len(spans[number].tokens) - spans[number].start for number in numbers]
            found = self._judge(hidden_BSI.flatten(0, 1), where, targets, counts)
            scores.update(zip(numbers, found, strict=True))
        return [scores[number] for number in range(len(spans))]

    def _hidden(self, batch: list[Row]) -> torch.Tensor:
        """What the head reads, (B, S, I), for rows padded on the right."""
        size = max(len(row.tokens) for row in batch)
        tokens_BS = torch.zeros(len(batch), size, dtype=torch.long)
        positions_BS = torch.zeros(len(batch), size, dtype=torch.long)
        # Padding sees itself: some kernels make NaN of a row that allows nothing, and NaN times 0 is NaN.
        visible_BSS = torch.eye(size, dtype=torch.bool).repeat(len(batch), 1, 1)
        for b, row in enumerate(batch):
            length = len(row.tokens)
            tokens_BS[b, :length] = torch.tensor(row.tokens)
            positions_BS[b, :length] = torch.tensor(row.positions)
            visible_BSS[b, :length, :length] = torch.from_numpy(row.visible())
        tokens_BS, positions_BS = tokens_BS.to(self.device), positions_BS.to(self.device)
        full_B1SS = visible_BSS.to(self.device)[:, None]
        masks = {"full": full_B1SS, "swa": full_B1SS}
        if self.sizes.sliding_window is not None:
            distance_BSS = positions_BS[:, :, None] - positions_BS[:, None, :]
            masks["swa"] = full_B1SS & (distance_BSS < self.sizes.sliding_window)[:, None]
        self.model._skip_lm_head = True
        try:
            return self.model(tokens_BS, positions_BS, masks)
        finally:
            self.model._skip_lm_head = False

    def _judge(
        self, hidden_TI: torch.Tensor, where: list[int], targets: list[int], counts: list[int]
    ) -> list[Score]:
        chosen_PI = hidden_TI[torch.tensor(where, dtype=torch.long, device=self.device)]
        target_P = torch.tensor(targets, dtype=torch.long, device=self.device)
        chunk = max(1, CHUNK_ELEMENTS // self.sizes.vocab_size)
        parts = [
            judge(self.model.lm_head(chosen_PI[i : i + chunk][None])[0], target_P[i : i + chunk])
            for i in range(0, len(targets), chunk)
        ]
        return _collect(parts, counts)


class HuggingFaceScorer:
    """Any causal language model that transformers can load; one sequence a row, padded on the right."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: str, batch_tokens: int | None, trust_remote_code: bool
    ):
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ValueError(
                f"{folder} is a Hugging Face folder, and reading it needs transformers: "
                "pip install transformers"
            ) from error
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=dtype, trust_remote_code=trust_remote_code).to(device).eval()
        self.device = torch.device(device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self.encoder: TextEncoder = HuggingFaceEncoder(tokenizer, self.model.config)
        self.batch_tokens = batch_tokens or default_batch_tokens(self.device)

    @torch.inference_mode()
    def score(self, spans: Sequence[Span]) -> list[Score]:
        scores: dict[int, Score] = {}
        for batch in batches(pack(spans, self.encoder.longest, share=False), self.batch_tokens):
            size = max(len(row.tokens) for row in batch)
            tokens_BS = torch.zeros(len(batch), size, dtype=torch.long)
            real_BS = torch.zeros(len(batch), size, dtype=torch.long)
            for b, row in enumerate(batch):
                tokens_BS[b, : len(row.tokens)] = torch.tensor(row.tokens)
                real_BS[b, : len(row.tokens)] = 1
            output = self.model(tokens_BS.to(self.device), attention_mask=real_BS.to(self.device))
            for b, row in enumerate(batch):
                span = spans[row.spans[0]]
                logits_PV = output.logits[b, span.start - 1 : len(row.tokens)]
                targets_P = torch.tensor(span.tokens[span.start :], dtype=torch.long, device=self.device)
                scores[row.spans[0]] = _collect([judge(logits_PV, targets_P)], [len(targets_P)])[0]
        return [scores[number] for number in range(len(spans))]


class HuggingFaceEncoder:
    def __init__(self, tokenizer: Any, config: Any):
        self.tokenizer = tokenizer
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            raise ValueError(f"{tokenizer.name_or_path}: the tokenizer has neither BOS nor EOS")
        self.bos_id: int = first
        self.longest: int = getattr(config, "max_position_embeddings", None) or 2048

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_start(self, text: str) -> list[int]:
        ids = self.tokenizer(text)["input_ids"]
        # A tokenizer that ends every text with EOS would put one in the middle of the prompt.
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids


def judge(logits_PV: torch.Tensor, targets_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """−log p of each target (float32) and whether it is the most likely token."""
    logits_PV = logits_PV.float()
    nll_P = torch.nn.functional.cross_entropy(logits_PV, targets_P, reduction="none")
    return nll_P, logits_PV.argmax(-1) == targets_P


def _collect(parts: list[tuple[torch.Tensor, torch.Tensor]], counts: list[int]) -> list[Score]:
    if not parts:
        return [Score(0.0, 0, True) for _ in counts]
    nll_P = torch.cat([nll for nll, _ in parts]).double().cpu()
    hit_P = torch.cat([hit for _, hit in parts]).cpu()
    return [
        Score(nll.sum().item(), count, bool(hit.all()))
        for nll, hit, count in zip(nll_P.split(counts), hit_P.split(counts), counts, strict=True)
    ]


def default_batch_tokens(device: torch.device) -> int:
    return 16384 if device.type == "cuda" else 4096


def is_run_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").exists()


def load_scorer(
    path: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    batch_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> Scorer:
    """The model of a checkpoint directory or a Hugging Face folder. Raises ValueError when it is neither."""
    if is_run_checkpoint(path):
        from model.checkpoint import load_checkpoint

        model, _, tokenizer = load_checkpoint(path, dtype=DTYPES[dtype], device=device)
        return LaneformerScorer(model, Tokenizer(tokenizer), batch_tokens)
    if (path / "config.json").exists():
        return HuggingFaceScorer(path, DTYPES[dtype], device, batch_tokens, trust_remote_code)
    raise ValueError(
        f"{path} is neither a complete checkpoint (no manifest.json) nor a Hugging Face folder (no config.json)"
    )


def checkpoint_step(path: Path) -> int:
    """The step of a run's checkpoint; 0 for a Hugging Face folder."""
    manifest = path / "manifest.json"
    return json.loads(manifest.read_text(encoding="utf-8"))["step"] if manifest.exists() else 0


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """What identifies the scored weights: path, and a hash over the manifest, which has every file's own, or
    over the Hugging Face folder's configuration and weights."""
    if is_run_checkpoint(path):
        files = [path / "manifest.json"]
    else:
        files = [path / "config.json", *sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {sha256_file(file)}\n".encode())
    return {"path": str(path), "sha256": digest.hexdigest()}
