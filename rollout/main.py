"""The ``rollout`` command: generation and rewards without training."""

from __future__ import annotations

import argparse
import sys

from accel.errors import AcceleratorError
from rollout.generate import add_arguments, generate
from samples.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Run ``accelrl rollout`` with ``argv`` (default: the process's own); returns the exit status."""
    parser = argparse.ArgumentParser(prog="accelrl rollout", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(
        commands.add_parser("generate", help="answer prompts with a model and score the answers", allow_abbrev=False)
    )
    args = parser.parse_args(argv)
    try:
        return generate(args)
    except (InputError, AcceleratorError) as error:
        print(f"accelrl: error: {error}", file=sys.stderr)
        return 2
