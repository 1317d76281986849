from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Before anything imports torch: one thread per process (tests run several), and nothing leaves the machine.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"
# Where transformers copies the code of exported models. One folder for the whole session: it imports what lies
# there as one package, which cannot move.
MODULES = tempfile.TemporaryDirectory(prefix="modules-")
os.environ["HF_MODULES_CACHE"] = MODULES.name

from train.device import prepare_torchtitan  # noqa: E402 - torch must see the thread count

prepare_torchtitan("cpu")  # before a test imports anything of torchtitan


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared data of tests/tiny.py."""
    from tests.tiny import write_data

    return write_data(tmp_path_factory.mktemp("tiny") / "data")
