"""What the fork server of tests/ranks.py imports once: everything a training rank needs."""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"

import torch

torch.set_num_threads(1)
importlib.import_module("train.device").prepare_torchtitan("cpu")
importlib.import_module("train.session")
