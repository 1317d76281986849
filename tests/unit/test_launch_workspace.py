"""The W&B workspace: what would be sent, with a stand-in for the server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.workspace import VIEW, build_workspace, save_workspace
from tests.unit.launch_fixtures import write_run
from train.config import ConfigError
from train.views import VIEWS

SECRET = "0123456789abcdef" * 2 + "01234567"


class Server:
    """Answers the two requests there are, and keeps what was saved."""

    def __init__(self) -> None:
        self.views: dict[str, dict[str, Any]] = {}
        self.requests: list[dict[str, Any]] = []

    def answer(self, api: Any, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(variables)
        if "spec" not in variables:
            found = self.views.get(variables["viewName"])
            return {"project": {"allViews": {"edges": [{"node": found}] if found else []}}}
        name = variables["name"]
        identity = variables.get("id") or f"id{len(self.views)}"
        self.views[name] = {
            "id": identity,
            "displayName": variables["displayName"],
            "spec": variables["spec"],
        }
        return {"upsertView": {"view": {"id": identity, "name": name}}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    import wandb
    from wandb_workspaces.workspaces import interface, internal

    class Api:
        default_entity = "team"

    server = Server()
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    monkeypatch.setattr(wandb, "Api", Api)
    monkeypatch.setattr(internal, "execute_graphql", server.answer)
    monkeypatch.setattr(interface, "get_app_url", lambda api: "https://wandb.ai")
    return server


def sections(spec: str) -> dict[str, list[dict[str, Any]]]:
    found = json.loads(spec)["section"]["panelBankConfig"]["sections"]
    return {section["name"]: [panel["config"] for panel in section["panels"]] for section in found}


def test_sections_and_charts_are_those_of_the_table() -> None:
    view = build_workspace("team", "laneformer")._to_model()
    found = sections(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    assert {name: [config["chartTitle"] for config in configs] for name, configs in found.items()} == {
        name: [chart.title for chart in charts] for name, charts in VIEWS.items()
    }
    shares, lr, core = found["Data mixture"][0], found["Stability"][1], found["Evaluation"][0]
    assert shares["metricRegex"] == "^(data/[^/]*/share|data/[^/]*/planned)$"
    assert shares["useMetricRegex"]
    assert (shares["xAxis"], core["xAxis"]) == ("train/tokens", "eval/step")
    assert lr["metrics"] == ["lr"]
    assert found["Stability"][0]["yLogScale"]
    assert view.spec.section.run_sets[0].grouping[0].name == "group"


def test_created_once_and_updated_afterwards(server: Server) -> None:
    assert save_workspace("laneformer") == f"https://wandb.ai/team/laneformer?nw={VIEW}"
    save_workspace("laneformer")
    saves = [request for request in server.requests if "spec" in request]
    assert [request.get("id") for request in saves] == [None, "id0"]
    assert list(server.views) == [f"nw-{VIEW}-v"]
    assert {request["entityName"] for request in server.requests} == {"team"}


def test_a_refusal_is_a_message(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "wandb_workspaces.workspaces.internal.execute_graphql", lambda *args, **kwargs: {"project": None}
    )
    with pytest.raises(ConfigError, match=r"Project `team/laneformer` not found.*WANDB_MODE=offline"):
        save_workspace("laneformer")


@pytest.mark.parametrize("key", [True, False])
def test_the_command_with_and_without_a_key(
    key: bool,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_run(tmp_path)
    run.mark_done(40)
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert main(["dashboard", str(run.path)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[-1] == os.fspath(run.path / "dashboard.html")
    assert lines[:-1] == ([f"https://wandb.ai/team/laneformer?nw={VIEW}"] if key else [])
    assert bool(server.requests) == key
    told = (
        captured.out + captured.err + json.dumps(server.requests) + (run.path / "dashboard.html").read_text()
    )
    assert SECRET not in told
