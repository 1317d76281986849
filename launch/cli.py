"""`python -m launch <verb>`: what starts other commands."""

from __future__ import annotations

import sys

from launch.smoke import smoke

USAGE = """usage: python -m launch smoke [--resume]

  smoke       the whole pipeline, small, on this machine's CPU: data, phase 1, phase 2, SFT, samples, report.
              Starts anew in runs/smoke; prepared data in data/smoke is kept.
    --resume  go on where an earlier smoke run was cut off
"""


def main(arguments: list[str]) -> int:
    if "--help" in arguments:
        print(USAGE)
        return 0
    verb, switches = arguments[0] if arguments else "", set(arguments[1:])
    if verb != "smoke" or switches - {"--resume"}:
        print(f"error: not understood: {' '.join(arguments) or 'nothing given'}\n\n{USAGE}", file=sys.stderr)
        return 2
    return smoke(resume="--resume" in switches)
