"""The ``rollout`` command: generation and rewards without training, and plans of rollout servers."""

from __future__ import annotations

import argparse
import sys

from accel.errors import AcceleratorError
from rollout.deploy.plan import add_plan_arguments, plan
from rollout.generate import add_arguments, generate
from samples.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Run ``accelrl rollout`` with ``argv`` (default: the process's own); returns the exit status."""
    parser = argparse.ArgumentParser(prog="accelrl rollout", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(
        commands.add_parser("generate", help="answer prompts with a model and score the answers", allow_abbrev=False)
    )
    add_plan_arguments(
        commands.add_parser("plan", help="show how rollout servers would lie on devices", allow_abbrev=False)
    )
    args = parser.parse_args(argv)
    try:
        return plan(args) if args.command == "plan" else generate(args)
    except (InputError, AcceleratorError) as error:
        print(f"accelrl: error: {error}", file=sys.stderr)
        return 2
