"""The mixture as a pure function: sequence n of a phase → (source, item, epoch).

A *recipe* (configs/data/*.yaml, the Hydra group `data`) is one phase: a token budget and the weights of its
sources, and the recipes consumed before it. From the recipe, the sequence length and the size of each
prepared source the whole order follows; nothing is drawn while training and nothing is stored.

* Which source: `schedule.py`. At every prefix each source is within one sequence of its share.
* Which item of it: the source has been used k times before, earlier phases included, so this is entry k mod N
  of epoch k div N, and an epoch is a seeded permutation of the N items (`permutation.py`). No item comes
  twice in an epoch, all come before the next begins, and a phase continues each source where the one before
  stopped.

An item is one training sequence of the source: a window of the stored stream, or one pack (see
`sequences.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_mixtures.permutation import permutation_key, permute
from data_mixtures.recipe import DataConfig, Packing, Phase, load_phases
from data_mixtures.schedule import Schedule
from data_mixtures.sequences import source_items

key_of = lru_cache(maxsize=4096)(permutation_key)


@dataclass(frozen=True, kw_only=True)
class SourceSize:
    """What the plan needs to know of a prepared source.

    items: training sequences in one epoch. tokens: as measured. sha256: of everything that decides its
    content.
    """

    items: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Place:
    """Where a sequence comes from: entry `item` of `source`, in that source's epoch `epoch` (from 0)."""

    phase: str
    source: str
    item: int
    epoch: int


class Mixture:
    """The order of one phase.

    `phases`: the recipes consumed before, in order, and last the one that this is about. `sizes`: at least
    the sources of the last phase. `tokenizer`: SHA-256 of the tokenizer that all sources were prepared with.

    Attributes: `sources` (names; their places number the sources), `sequences` (length of the phase),
    `phase`, `phases`, `sizes`, `seq_len`, `seed`, `packing`, `tokenizer`.

    Raises ValueError, all problems at once: a source without items, one that would be used for more than
    `max_epochs` over all phases, a phase shorter than one sequence.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        sizes: Mapping[str, SourceSize],
        *,
        seq_len: int,
        seed: int,
        packing: Packing,
        max_epochs: float,
        tokenizer: str,
    ) -> None:
        self.phases = tuple(phases)
        self.phase = self.phases[-1]
        self.seq_len, self.seed, self.tokenizer = seq_len, seed, tokenizer
        self.packing: Packing = packing
        self.sequences = self.phase.tokens // seq_len
        weights = _ends(self.phase, self.phases)
        self.sources = list(weights[-1])
        self.sizes = {source: sizes[source] for source in self.sources}
        self._items_K = np.array([self.sizes[source].items for source in self.sources], dtype=np.int64)
        self._schedule = _schedule(self.phase, self.phases, seq_len)
        self._used_before_K = self._count_earlier()
        self._check(max_epochs)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sources, items and epochs of the sequences at `positions` (n,) int64; all int64 (n,).

        Sources are indices into `self.sources`.
        """
        source, ordinal = self._schedule.locate(positions)
        epoch, entry = np.divmod(self._used_before_K[source] + ordinal, self._items_K[source])
        pairs = zip(source.tolist(), epoch.tolist(), strict=True)
        keys = np.array([key_of(self.seed, self.sources[s], e) for s, e in pairs], dtype=np.uint64)
        return source, permute(entry, self._items_K[source], keys), epoch

    def place(self, position: int) -> Place:
        """Where the sequence at `position` comes from."""
        source, item, epoch = self.locate(np.array([position], dtype=np.int64))
        return Place(self.phase.name, self.sources[int(source[0])], int(item[0]), int(epoch[0]))

    def consumed(self, position: int) -> dict[str, int]:
        """Sequences that each source gives in the first `position` of the phase."""
        return dict(zip(self.sources, self._schedule.counts(position).tolist(), strict=True))

    def consumed_before(self) -> dict[str, int]:
        """Sequences that each source gave in the earlier phases."""
        return dict(zip(self.sources, self._used_before_K.tolist(), strict=True))

    def epochs(self) -> dict[str, float]:
        """How often each source will have been read at the end of the phase, earlier phases included."""
        used_K = self._used_before_K + self._schedule.counts(self.sequences)
        return dict(zip(self.sources, (used_K / self._items_K).tolist(), strict=True))

    def _count_earlier(self) -> np.ndarray:
        used = dict.fromkeys(self.sources, 0)
        for phase in self.phases[:-1]:
            names = list(_ends(phase, self.phases)[-1])
            counts = _schedule(phase, self.phases, self.seq_len).counts(phase.tokens // self.seq_len)
            for source, count in zip(names, counts.tolist(), strict=True):
                if source in used:
                    used[source] += count
        return np.array(list(used.values()), dtype=np.int64)

    def _check(self, max_epochs: float) -> None:
        problems = []
        if self.sequences < 1:
            problems.append(f"its {self.phase.tokens} tokens are less than one sequence of {self.seq_len}")
        empty = [source for source, size in self.sizes.items() if size.items < 1]
        for source in empty:
            problems.append(
                f"source {source} holds {self.sizes[source].tokens} tokens, "
                f"not one sequence of {self.seq_len}"
            )
        if not empty:
            for source, epochs in self.epochs().items():
                if epochs > max_epochs:
                    problems.append(
                        f"source {source} would be read {epochs:.2f} times over the phases "
                        f"{' + '.join(phase.name for phase in self.phases)}, the cap is {max_epochs:g}; "
                        "lower its weight or the token budget, prepare more of it, or raise max_epochs"
                    )
        if problems:
            raise ValueError(f"recipe {self.phase.name}: " + "; ".join(problems))


def build_mixture(config: DataConfig, seq_len: int) -> Mixture:
    """The mixture of a recipe over the sources prepared under `config.root`.

    Raises ValueError that names the source when it is not prepared, or prepared with another tokenizer than
    the rest, or too small.
    """
    phases = load_phases(config, seq_len)
    sizes: dict[str, SourceSize] = {}
    tokenizers: dict[str, str] = {}
    for source in _ends(phases[-1], phases)[-1]:
        items, manifest_sha256, manifest = source_items(
            Path(config.root) / source / "train", seq_len, config.packing
        )
        sizes[source] = SourceSize(items=items, tokens=manifest["tokens"], sha256=manifest_sha256)
        tokenizers[source] = manifest["tokenizer_sha256"]
    if len(set(tokenizers.values())) > 1:
        used = ", ".join(f"{source} {sha256[:12]}" for source, sha256 in tokenizers.items())
        raise ValueError(
            f"{config.root}: sources were prepared with different tokenizers ({used}); prepare them with one"
        )
    return Mixture(
        phases,
        sizes,
        seq_len=seq_len,
        seed=config.seed,
        packing=config.packing,
        max_epochs=config.max_epochs,
        tokenizer=next(iter(tokenizers.values())),
    )


def _ends(phase: Phase, phases: Sequence[Phase]) -> list[dict[str, Fraction]]:
    """The weights a phase starts and ends with, over one list of sources; the end's alone without a ramp."""
    if phase.ramp is None:
        return [dict(phase.weights)]
    start = next(other for other in phases if other.name == phase.ramp.start).weights
    sources = dict.fromkeys([*phase.weights, *start])
    return [{s: weights.get(s, Fraction(0)) for s in sources} for weights in (start, phase.weights)]


def _schedule(phase: Phase, phases: Sequence[Phase], seq_len: int) -> Schedule:
    *start, end = _ends(phase, phases)
    length = phase.ramp.tokens // seq_len if phase.ramp else 0
    ramp = (list(start[0].values()), length) if start and length else None
    return Schedule(list(end.values()), ramp)
