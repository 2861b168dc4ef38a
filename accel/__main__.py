"""``python -m accel list | doctor | conformance | emulation``: what is there, and whether a backend is right."""

from __future__ import annotations

import argparse
import json
import os
import sys

from accel.safe_path import secure_sys_path


def main(argv: list[str] | None = None) -> int:
    """Run one command. 0: fine; 1: the asked accelerator is unusable, or a check failed; 2: the arguments are wrong."""
    options = _parser().parse_args(argv)
    from accel.errors import AcceleratorError

    try:
        return options.run(options)
    except AcceleratorError as error:
        print(f"accel: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accelrl accel", description="The accelerators of this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser(
        "list", allow_abbrev=False, help="every registered accelerator and whether it is usable"
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)

    doctor = commands.add_parser(
        "doctor", allow_abbrev=False, help="devices, versions, settings and contradictions, with fixes"
    )
    doctor.set_defaults(run=_doctor)
    conformance = commands.add_parser(
        "conformance", allow_abbrev=False, help="prove a backend: run the suite against a live device"
    )
    conformance.add_argument("--world-size", type=_ranks, default=2, metavar="N", help="ranks (default: 2)")
    conformance.add_argument(
        "--subject", type=_subject, action="append", metavar="NAME", help="only these checks; repeatable"
    )
    conformance.set_defaults(run=_conformance)
    emulation = commands.add_parser("emulation", help="the emulated MUSA device: compile it ahead of its first use")
    emulation.add_argument("action", choices=["build"], help="build: compile it into the user's cache")
    emulation.set_defaults(run=_emulation)
    for command in (doctor, conformance):
        command.add_argument("--accelerator", metavar="NAME", help="default: ACCELRL_ACCELERATOR, else the best usable")
        command.add_argument("--emulate", action="store_true", help="its emulation in host memory, where it has one")
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _ranks(text: str) -> int:
    from accel.conformance.runner import MOST_RANKS

    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    if not 1 <= number <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text}: give the number of ranks, 1 to {MOST_RANKS}")
    return number


def _subject(text: str) -> str:
    from accel.conformance.runner import subject_names

    if text not in subject_names():
        raise argparse.ArgumentTypeError(f"no subject is named {text!r}: choose among {', '.join(subject_names())}")
    return text


def _list(options: argparse.Namespace) -> int:
    from accel.registry import available_accelerators

    probes = available_accelerators()
    if options.json:
        rows = {
            name: {"usable": p.usable, "reason": p.reason, "origin": p.registration.origin}
            for name, p in probes.items()
        }
        _say(json.dumps(rows, indent=2))
        return 0
    width = max(len(name) for name in probes)
    states = {name: "usable" if probe.usable else f"not usable: {probe.reason}" for name, probe in probes.items()}
    _say("\n".join(f"{name:<{width}}  {state}" for name, state in states.items()))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from accel.doctor.diagnosis import diagnose
    from accel.doctor.display import render

    diagnosis = diagnose(options.accelerator, emulate=options.emulate)
    _say(json.dumps(diagnosis.as_dict(), indent=2) if options.json else render(diagnosis))
    return 0 if diagnosis.selected is not None else 1


def _conformance(options: argparse.Namespace) -> int:
    from accel.conformance.runner import run_conformance
    from accel.registry import select_accelerator

    accelerator = select_accelerator(options.accelerator, emulate=options.emulate)
    report = run_conformance(accelerator, options.world_size, options.subject)
    _say(json.dumps(report.as_dict(), indent=2) if options.json else report.text(emulated=accelerator.emulated))
    return 0 if report.passed else 1


def _emulation(options: argparse.Namespace) -> int:  # noqa: ARG001 - build is the only action
    from accel.emulation.build import build

    _say(str(build()))
    return 0


def _say(text: str) -> None:
    """Print it; a reader that has seen enough, such as head, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes again


if __name__ == "__main__":
    secure_sys_path()
    sys.exit(main())
