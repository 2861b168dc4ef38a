"""``python -m observability report RUN_DIR``: write a run's report.html anew."""

from __future__ import annotations

import argparse
import sys

from samples.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Run with ``argv`` (default: the process's own); returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m observability", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="write report.html from what lies in a run's directory")
    report.add_argument("run_dir", metavar="RUN_DIR", help="the directory that a run wrote, --output-dir")
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
