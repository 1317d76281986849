"""The plan for people: tables on the terminal and a chart of the shift."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from data_mixtures.plan import Plan, SourceRow, plan_for

LABELS = {
    "general": "general",
    "code": "code",
    "math_reasoning": "math + reasoning",
    "chat": "chat",
    "identity": "identity",
    "uncatalogued": "not in the catalogue",
}


def plan_command(values: dict[str, str], switches: set[str]) -> int:
    """`plan experiment=… | recipe=… [root=…] [out=plan.png] [--json]`: print the plan and draw it.

    Raises ValueError for everything that `make_plan` refuses.
    """
    plan = plan_for(values.get("experiment", ""), values.get("recipe", ""), values.get("root", ""))
    out = values.get("out", "plan.png")
    if "--json" in switches:
        print(json.dumps(plan.to_dict(), indent=1))
    else:
        print_plan(plan)
    if out:
        from data_mixtures.plan_chart import draw_plan

        draw_plan(plan, Path(out))
        if "--json" not in switches:
            print(f"chart: {out}")
    return 0


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the sources, the categories side by side, and the ramp where there is one."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=160)
    console.print(_source_table(plan))
    console.print(_category_table(plan))
    if plan.ramp:
        console.print(_ramp_table(plan))


def _source_table(plan: Plan) -> Table:
    table = Table(title=f"{plan.name}: {tokens_text(plan.phase_tokens[-1])} tokens", box=box.SIMPLE_HEAD)
    table.add_column("source", no_wrap=True)
    for phase in plan.phases:
        table.add_column(f"{phase} %", justify="right")
    for heading in ("tokens", "epochs", "cumulative", "size", "", "to prepare", "disk"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for category in plan.categories:
        rows = [row for row in plan.rows if row.category == category]
        table.add_row(f"[bold]{LABELS[category]}")
        for row in rows:
            table.add_row(f"  {row.name}", *_cells(row))
    needed, disk = sum(row.needed_tokens for row in plan.rows), sum(row.disk_bytes for row in plan.rows)
    shares = [percent(sum(row.weights[i] for row in plan.rows)) for i in range(len(plan.phases))]
    table.add_section()
    last_tokens = tokens_text(sum(row.tokens[-1] for row in plan.rows))
    table.add_row("[bold]all", *shares, last_tokens, "", "", "", "", tokens_text(needed), bytes_text(disk))
    return table


def _cells(row: SourceRow) -> list[str]:
    return [
        *(percent(weight) for weight in row.weights),
        tokens_text(row.tokens[-1]) if row.tokens[-1] else "–",
        f"{row.epochs[-1]:.2f}" if row.tokens[-1] else "–",
        f"{row.cumulative_epochs:.2f}",
        tokens_text(row.size_tokens),
        row.size_is,
        tokens_text(row.needed_tokens),
        bytes_text(row.disk_bytes),
    ]


def _category_table(plan: Plan) -> Table:
    table = Table(title="by category", box=box.SIMPLE_HEAD)
    table.add_column("category")
    for phase, tokens in zip(plan.phases, plan.phase_tokens, strict=True):
        table.add_column(f"{phase} ({tokens_text(tokens)}) %", justify="right")
    if len(plan.phases) > 1:
        table.add_column("shift", justify="right")
    for category, shares in plan.categories.items():
        shift = [f"{100 * (shares[-1] - shares[-2]):+.2f}"] if len(shares) > 1 else []
        table.add_row(LABELS[category], *map(percent, shares), *shift)
    return table


def _ramp_table(plan: Plan) -> Table:
    table = Table(title=f"ramp from {plan.ramp_from}, % by tokens into {plan.name}", box=box.SIMPLE_HEAD)
    table.add_column("tokens", justify="right")
    for category in plan.categories:
        table.add_column(LABELS[category], justify="right")
    for row in plan.ramp:
        shares = [f"{100 * row.categories.get(category, 0.0):.2f}" for category in plan.categories]
        table.add_row(tokens_text(row.tokens), *shares)
    return table


def percent(share: float) -> str:
    """A share in per cent with the digits that matter: 20.9, 0.25, 0.01; a dash for nothing."""
    return f"{100 * share:.4f}".rstrip("0").rstrip(".") if share else "–"


def tokens_text(tokens: float) -> str:
    """A count with three digits and a unit: 4T, 81.9B, 210M."""
    return _scaled(tokens, ("", "K", "M", "B", "T"), "")


def bytes_text(count: float) -> str:
    """A number of bytes with three digits and a decimal unit: 10.7 TB."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def _scaled(value: float, units: tuple[str, ...], gap: str) -> str:
    step = 0
    while value >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g}{gap}{units[step]}".rstrip()
