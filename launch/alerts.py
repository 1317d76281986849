"""Tell people what happened to a run: a command of the site's, and an alert in W&B where a key is set.

W&B's is sent by a process of its own (`python -m launch.alerts RUN MESSAGE`) with a time limit: a job must not wait for
a server that does not answer. It joins the run as the evaluation does (train/wandb_mode.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from train.config import load_resolved
from train.run_dir import RunDir
from train.wandb_mode import wandb_mode

SECONDS = 60


def alert(run: RunDir, message: str, say: Callable[[str], None]) -> None:
    """Run ALERT_COMMAND (site.env), if set, with `run name: message` as $1, and alert in W&B. Both may fail."""
    text = f"{run.path.name}: {message}"
    command = os.environ.get("ALERT_COMMAND")
    if command:
        attempt(["bash", "-c", command, "alert", text], "ALERT_COMMAND", say)
    if wandb_mode() == "shared" and load_resolved(run.resolved).metrics.wandb:
        attempt([sys.executable, "-m", "launch.alerts", os.fspath(run.path), text], "the alert in W&B", say)


def attempt(command: list[str], what: str, say: Callable[[str], None]) -> None:
    try:
        subprocess.run(command, check=True, timeout=SECONDS, stdout=sys.stderr)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{what} failed: {error}")


def wandb_alert(run: RunDir, text: str) -> None:
    import wandb

    config = load_resolved(run.resolved)
    session = wandb.init(
        project=config.metrics.wandb_project,
        id=run.wandb_id(),
        dir=os.fspath(run.path),
        mode="shared",
        settings=wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            x_primary=False,
            x_label="launch",
            x_update_finish_state=False,
        ),
    )
    session.alert(title=f"{config.name}: {text.split(': ')[1]}", text=text)
    session.finish()


if __name__ == "__main__":
    wandb_alert(RunDir(sys.argv[1]), sys.argv[2])
