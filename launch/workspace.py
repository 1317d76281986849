"""The project's W&B workspace: train/views.py as sections of charts, created once and updated afterwards.

The saved view has a fixed name in the project, so that every run of it, on whatever machine, updates the same one.
Panels take patterns of tags, which makes one workspace right for runs of any mixture; runs are grouped by their chain
of phases. Built with the package wandb-workspaces. This repository's tests check what is sent; W&B's servers have not
been asked.
"""

from __future__ import annotations

import os
from typing import Any

import wandb
from wandb_workspaces import expr
from wandb_workspaces.reports import v2 as panels
from wandb_workspaces.workspaces import interface as workspaces

from train.config import ConfigError
from train.views import VIEWS, Chart

TITLE = "Laneformer"
VIEW = "laneformerviews"  # the view's name in its address: …/project?nw=laneformerviews


def build_workspace(entity: str, project: str) -> workspaces.Workspace:
    sections = [
        workspaces.Section(
            name=title,
            panels=[
                panel(chart, "eval/step" if title == "Evaluation" else "train/tokens") for chart in charts
            ],
            is_open=True,
            layout_settings=workspaces.SectionLayoutSettings(columns=3, rows=-(-len(charts) // 3)),
        )
        for title, charts in VIEWS.items()
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=TITLE,
        sections=sections,
        runset_settings=workspaces.RunsetSettings(groupby=[expr.Metric("Group")]),
    )


def panel(chart: Chart, x: str) -> panels.LinePlot:
    return panels.LinePlot(
        title=chart.title,
        x=x,
        y=list(chart.tags) if chart.exact else [],
        metric_regex=None if chart.exact else chart.pattern,
        title_y=chart.unit or None,
        log_y=chart.log or None,
        plot_type="stacked-area" if chart.stacked else None,
    )


def save_workspace(project: str) -> str:
    """Create the workspace, or update it where it is there; returns its address.

    Raises ConfigError with what W&B says where it refuses.
    """
    try:
        api: Any = wandb.Api()
        entity = os.environ.get("WANDB_ENTITY") or api.default_entity
        workspace = build_workspace(entity, project)
        workspace._internal_name = f"nw-{VIEW}-v"
        existing = find(f"https://wandb.ai/{entity}/{project}?nw={VIEW}")
        if existing is not None:
            workspace._internal_id = existing._internal_id
            workspace._internal_runset_id = existing._internal_runset_id
        return workspace.save().url
    except (wandb.Error, ValueError, OSError) as error:
        raise ConfigError(
            [
                f"W&B did not take the workspace of project {project}: {error}; "
                "WANDB_MODE=offline writes the HTML alone"
            ]
        ) from error


def find(address: str) -> workspaces.Workspace | None:
    """The saved view, or None where there is none."""
    try:
        return workspaces.Workspace.from_url(address)
    except ValueError as error:
        if "not found in project" in str(error):
            return None
        raise
