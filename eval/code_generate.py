"""Models that continue texts, for eval/code_score.py: a checkpoint of a run, or a Hugging Face folder.

A prompt begins with BOS, as every training document does. One that does not fit the model's context gets the
empty continuation, and is counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from data_mixtures import tokenizer as tokenizer_module
from data_mixtures.tokenizer import Tokenizer
from eval.adapter import DTYPES, is_run_checkpoint
from eval.code_prompts import Render, chat_renderer

if TYPE_CHECKING:
    from model.laneformer import Laneformer

TEMPLATE = Path(tokenizer_module.__file__).with_name("chat_template.jinja")


class Generator(Protocol):
    """A `Generate` (eval/code_score.py) with what else is known of the model."""

    render: Render | None
    """The model's chat template; None when it has none."""
    too_long: int
    """Prompts so far that did not fit."""

    def __call__(
        self,
        prompts: list[str],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stops: list[str],
    ) -> list[str]: ...


class LaneformerGenerator:
    """A Laneformer on one device."""

    def __init__(self, model: Laneformer, tokenizer: Tokenizer) -> None:
        from model.delayed_tp import LaneGroup

        self.group = LaneGroup.of(model)
        self.tokenizer = tokenizer
        self.render: Render | None = chat_renderer(TEMPLATE.read_text())
        self.too_long = 0

    def __call__(
        self,
        prompts: list[str],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stops: list[str],
    ) -> list[str]:
        from model.decode import Sampling, generate

        tokens = [self.tokenizer.encode(text, bos=True) for text in prompts]
        fit = [i for i, ids in enumerate(tokens) if len(ids) <= self.group.sizes.max_position_embeddings]
        self.too_long += len(tokens) - len(fit)
        texts = [""] * len(prompts)
        if fit:
            generations, _ = generate(
                self.group,
                [tokens[i] for i in fit],
                self.tokenizer.decode,
                max_new_tokens=max_new_tokens,
                sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
                eos_id=self.tokenizer.eos_id,
                stops=stops,
            )
            for i, generation in zip(fit, generations, strict=True):
                texts[i] = generation.text
        return texts


class HuggingFaceGenerator:
    """Any causal language model that transformers can load."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str, trust_remote_code: bool) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ValueError(
                f"{folder} is a Hugging Face folder, and reading it needs transformers: pip install transformers"
            ) from error
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, padding_side="left"
        )
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code
        )
        self.model = model.to(device).eval()
        self.limit: int = getattr(self.model.config, "max_position_embeddings", 2**31)
        template = self.tokenizer.chat_template
        ends = (self.tokenizer.eos_token or "", self.tokenizer.bos_token or "")
        self.render: Render | None = chat_renderer(template, *ends) if template else None
        self.too_long = 0

    def _encode(self, texts: list[str]) -> Any:
        """Ids and mask, padded on the left. A BOS that a chat template has written is not added again."""
        bos = self.tokenizer.bos_token
        written = bool(bos) and texts[0].startswith(bos)
        return self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not written)

    def __call__(
        self,
        prompts: list[str],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stops: list[str],
    ) -> list[str]:
        fit = [i for i, text in enumerate(prompts) if self._encode([text]).input_ids.shape[1] < self.limit]
        self.too_long += len(prompts) - len(fit)
        texts = [""] * len(prompts)
        if fit:
            given = self._encode([prompts[i] for i in fit]).to(self.model.device)
            length = given.input_ids.shape[1]
            drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
            torch.manual_seed(seed)
            with torch.inference_mode():
                tokens_BS = self.model.generate(
                    input_ids=given.input_ids,
                    attention_mask=given.attention_mask,
                    max_new_tokens=min(max_new_tokens, self.limit - length),
                    pad_token_id=self.tokenizer.pad_token_id,
                    stopping_criteria=[self._at_a_stop(stops, length)],
                    **(drawn if temperature else {"do_sample": False}),
                )
            new = self.tokenizer.batch_decode(tokens_BS[:, length:], skip_special_tokens=True)
            for i, text in zip(fit, new, strict=True):
                texts[i] = text
        return texts

    def _at_a_stop(self, stops: list[str], length: int) -> Callable[..., torch.Tensor]:
        """Which rows have a stop among their newest tokens, as transformers asks after every token."""
        tail = 4 * max(map(len, stops), default=0) + 8

        def at_a_stop(tokens_BS: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            newest_BT = tokens_BS[:, max(length, tokens_BS.shape[1] - tail) :]
            texts = self.tokenizer.batch_decode(newest_BT)
            found = [any(stop in text for stop in stops) for text in texts]
            return torch.tensor(found, device=tokens_BS.device)

        return at_a_stop


def load_generator(
    path: Path, *, device: str = "cpu", dtype: str = "float32", trust_remote_code: bool = False
) -> Generator:
    """The model of a checkpoint directory or a Hugging Face folder. Raises ValueError when it is neither."""
    if is_run_checkpoint(path):
        from model.checkpoint import load_checkpoint

        model, _, tokenizer = load_checkpoint(path, dtype=DTYPES[dtype], device=device)
        return LaneformerGenerator(model, Tokenizer(tokenizer))
    if (path / "config.json").exists():
        return HuggingFaceGenerator(path, DTYPES[dtype], device, trust_remote_code)
    raise ValueError(
        f"{path} is neither a complete checkpoint (no manifest.json) nor a Hugging Face folder (no config.json)"
    )


def template_sha256() -> str:
    """Of the chat template that our own checkpoints are asked with."""
    return hashlib.sha256(TEMPLATE.read_bytes()).hexdigest()
