"""The data plan's loader, in the form torchtitan's trainer builds and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from data_mixtures.loader import MixtureLoader
from data_mixtures.mixture import build_mixture
from data_mixtures.recipe import DataConfig
from data_mixtures.tokenizer import Tokenizer


class MixtureDataLoader(BaseDataLoader):
    """Adapter around `MixtureLoader`; its state is one position and two hashes, the same on every rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        data: DataConfig
        plan_file: str = ""
        """The run's plan.json, to name what changed when a checkpoint's plan is another."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **unused: Any,
    ):
        self.loader = MixtureLoader(
            build_mixture(config.data, seq_len),
            root=config.data.root,
            plan_file=Path(config.plan_file),
            rank=dp_rank,
            world_size=dp_world_size,
            local_batch_size=local_batch_size,
            seq_len=seq_len,
        )

    @property
    def sources(self) -> list[str]:
        """Names of the sources; a batch's "source" holds indices into this list."""
        return self.loader.mixture.sources

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)


class RunTokenizer(BaseTokenizer):
    """The run's SentencePiece tokenizer behind torchtitan's interface."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()
        self.inner = Tokenizer(Path(tokenizer_path))
        self.eos_id = self.inner.eos_id

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)

    def get_vocab_size(self) -> int:
        return self.inner.vocab_size
