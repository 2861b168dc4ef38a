"""``python -m observability report RUN_DIR``: write a run's report.html anew."""

from __future__ import annotations

import argparse
import sys

from samples.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Run ``python -m observability`` with ``argv`` (default: the process's own); returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] != ["report"]:
        print("usage: python -m observability report RUN_DIR", file=sys.stderr)
        return 2
    return report(arguments[1:])


def report(argv: list[str]) -> int:
    """Run ``accelrl report RUN_DIR``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="accelrl report", description="Write report.html from what lies in a run's directory.", allow_abbrev=False
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the directory that a run wrote, --output-dir")
    args = parser.parse_args(argv)
    from observability.report import write_report

    try:
        print(write_report(args.run_dir))
    except InputError as error:
        print(f"accelrl: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
