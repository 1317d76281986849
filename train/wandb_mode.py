"""How this process talks to W&B. Imports neither torch nor wandb."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["shared", "offline", "disabled"]


def wandb_mode() -> Mode:
    """ "shared" where a key is set, else "offline"; WANDB_MODE may ask for less.

    Shared rather than online: an evaluation job writes to the same W&B run while the trainer does. In online mode
    a process numbers its lines of history itself, so that two of them, or one that resumes beside the other, would
    overwrite each other's; in shared mode the server appends what comes.
    """
    asked = os.environ.get("WANDB_MODE", "")
    if asked == "disabled":
        return "disabled"
    return "offline" if asked in ("offline", "dryrun") or not has_wandb_key() else "shared"


def has_wandb_key() -> bool:
    """Whether WANDB_API_KEY is set or netrc has a password for the W&B server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
