"""What a person looks at while a run trains: one table for W&B, TensorBoard and the local dashboard. Imports no torch.

A chart names tags of the metrics' rows; `*` stands for one word between slashes: a source, a task, a part. The
W&B workspace and TensorBoard's layout take the patterns, so that one layout is right for every mixture; the local
dashboard draws the tags that the run has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Chart:
    """Lines over tokens; of scores over the step they were scored at."""

    title: str
    unit: str
    tags: tuple[str, ...]
    log: bool = False
    """Logarithmic y-axis."""
    stacked: bool = False
    """Parts of a whole, drawn on top of each other."""
    from_zero: bool = False
    """The y-axis begins at 0."""
    dashed: str = ""
    """What the tags of dashed lines end in."""

    @cached_property
    def pattern(self) -> str:
        """A regular expression that matches exactly the chart's tags."""
        words = [re.escape(tag).replace(r"\*", "[^/]*") for tag in self.tags]
        return f"^({'|'.join(words)})$"

    @property
    def exact(self) -> bool:
        return not any("*" in tag for tag in self.tags)

    def of(self, tags: Iterable[str]) -> list[str]:
        """Those of `tags` that the chart shows, in the chart's order."""
        wanted = [re.compile(Chart("", "", (tag,)).pattern) for tag in self.tags]
        given = list(dict.fromkeys(tags))
        return [tag for pattern in wanted for tag in given if pattern.match(tag)]


VIEWS: dict[str, tuple[Chart, ...]] = {
    "Loss": (
        Chart("Training loss", "nats per token", ("loss", "loss/*")),
        Chart("Held-out loss", "nats per token", ("validation/*/loss",)),
        Chart("Held-out bits per byte", "bits per byte", ("validation/*/bits_per_byte",)),
    ),
    "Data mixture": (
        Chart(
            "Sequences: consumed, and planned (dashed)",
            "share of all",
            ("data/*/share", "data/*/planned"),
            dashed="/planned",
            from_zero=True,
        ),
        Chart("Predicted tokens of each source", "tokens", ("data/*/tokens",), from_zero=True),
    ),
    "System": (
        Chart("Speed", "tokens per second", ("tokens_per_second",), from_zero=True),
        Chart("Model FLOPs utilisation", "share of the peak", ("mfu",), from_zero=True),
        Chart(
            "Where a step's time goes",
            "seconds",
            (
                "seconds/data",
                "seconds/forward_backward",
                "seconds/optimizer",
                "seconds/checkpoint",
                "seconds/validation",
            ),
            stacked=True,
        ),
        Chart(
            "A rank's own time in a step",
            "seconds",
            ("ranks/own_median", "ranks/own_slowest"),
            from_zero=True,
        ),
        Chart("Memory", "GiB", ("memory_gib",), from_zero=True),
        Chart("Batches ready in the loader", "batches", ("loader/ready",), from_zero=True),
    ),
    "Stability": (
        Chart("Gradient norm before clipping", "", ("grad_norm",), log=True),
        Chart("Learning rate", "", ("lr",), from_zero=True),
        Chart("Gradient norm of each lane", "", ("lanes/*/grad_norm",), log=True),
        Chart("Update of each lane over its weights", "ratio of norms", ("lanes/*/update_ratio",), log=True),
        Chart("Each lane's share of the residual", "share of the squared norm", ("lanes/*/residual_share",)),
    ),
    "Evaluation": (
        Chart("CORE", "centred accuracy", ("eval/core*/v2", "eval/builtin/v2")),
        Chart("Code", "share of problems solved", ("eval/*/pass@*", "eval/*/sampled_pass@*")),
        Chart("Tasks", "centred accuracy", ("eval/*_task/*",)),
        Chart("Held out, of saved checkpoints", "nats per token", ("eval/validation/*/loss",)),
    ),
}
