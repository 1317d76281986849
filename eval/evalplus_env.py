"""evalplus in a virtual environment of its own, made once by `setup`.

Its own, because its dependencies ask for versions (protobuf, transformers, …) that training should not have to
follow. The release is pinned, because it is the judge: version 0.3.1 fixes the data (HumanEval+ v0.1.10, MBPP+
v0.2.0), the prompts, the sanitizer, the tolerances and the time limits that published numbers rest on. Its
dependencies are left free, since judged programs only see numpy of them; what was installed is recorded, and
eval/code_judge.py scores the reference solutions before it believes an environment.

Known faults of 0.3.1, and the setting that goes around each:

* its limit of 4 GB of address space counts what the judging process itself holds, and fails Mbpp/255 and
  Mbpp/392 for right solutions: EVALPLUS_MAX_MEMORY_BYTES=-1, the sandbox limits memory instead;
* a time limit of one second is missed by right solutions on a busy machine: min_time_limit=4;
* EVALPLUS_TIMEOUT_PER_TASK, if set, raises TypeError: never set;
* an existing results file is reused in silence: each run has a new /tmp;
* pass@k is printed for k = 1, 10, 100 alone: computed by eval/pass_at_k.py from the verdicts;
* HumanEval/32 fails every solution (the branch for its oracle skips the line that counts the test as passed):
  the official number includes it, and a second one leaves it out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eval.results import write_atomic
from eval.sandbox import Room

PIN = "evalplus==0.3.1"
FOLDER = Path(__file__).resolve().parents[1] / ".venv-evalplus"
STAMP = "evalplus-environment.json"
SETUP_COMMAND = "make setup-evalplus"


class EvalplusMissing(RuntimeError):
    """There is no complete environment; the message gives the command that makes it."""


@dataclass(frozen=True)
class Environment:
    """A complete environment."""

    folder: Path
    base: Path
    """The Python installation it was made from."""
    packages: Mapping[str, str]

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def room(self, files: Mapping[str, bytes], stdin: bytes = b"") -> Room:
        """A sandbox with this environment, read-only at its own path, and `files`."""
        bind = {path: str(path) for path in (self.folder, self.base) if not path.is_relative_to("/usr")}
        # Sets of strings in a fixed order: a solution that depends on it gets the same verdict every time.
        return Room(files=files, bind=bind, environment={"PYTHONHASHSEED": "0"}, stdin=stdin)


def environment(folder: Path = FOLDER) -> Environment:
    """The environment in `folder`. Raises EvalplusMissing."""
    stamp = folder / STAMP
    if not stamp.exists():
        raise EvalplusMissing(f"there is no evalplus environment in {folder}: {SETUP_COMMAND}")
    found = json.loads(stamp.read_text())
    if found["pin"] != PIN:
        raise EvalplusMissing(f"{folder} holds {found['pin']} and {PIN} is needed: {SETUP_COMMAND}")
    base = Path(found["base"])
    if not base.exists():
        raise EvalplusMissing(f"{folder} was made from {base}, which is gone: {SETUP_COMMAND}")
    return Environment(folder.resolve(), base, found["packages"])


def setup(folder: Path = FOLDER, say: Callable[[str], None] = print) -> Environment:
    """Make the environment unless it is complete. Needs a package index. Raises EvalplusMissing."""
    try:
        return environment(folder)
    except EvalplusMissing as missing:
        say(f"{missing.args[0].rpartition(':')[0]}: making it (1 to 2 minutes, 0.9 GB)")
    # Without links on the way: the sandbox holds the installation at this path alone.
    interpreter = Path(sys.executable).resolve()
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    try:
        subprocess.run([str(interpreter), "-m", "venv", "--clear", str(folder)], check=True)
        (folder / ".gitignore").write_text("*\n")
        subprocess.run([*pip, "install", "--quiet", PIN], check=True)
        listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True).stdout
    except (subprocess.CalledProcessError, OSError) as error:
        raise EvalplusMissing(
            f"{PIN} could not be installed in {folder} ({error}): {SETUP_COMMAND}"
        ) from error
    stamp = {
        "pin": PIN,
        "base": str(interpreter.parents[1]),
        "python": sys.version.split()[0],
        "packages": {package["name"]: package["version"] for package in json.loads(listed)},
    }
    write_atomic(folder / STAMP, json.dumps(stamp, indent=1) + "\n")
    return environment(folder)
