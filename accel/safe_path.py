"""Keeps a folder of the user's from standing in front of our packages, whose names are common words.

``python -m train`` puts the working directory first on the module path: a ``hooks/`` or ``samples.py`` there would be
imported instead of ours. The other packages run this as a file (see ``train/safe_path.py``): it imports nothing of
ours.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("accel", "samples", "observability", "hooks", "filters", "rollout", "train")


def secure_sys_path() -> None:
    """Takes the working directory off the front of ``sys.path``, unless our packages live there.

    Prints an error and exits with status 2 if something else on the path (``PYTHONPATH``) still hides one of them.
    """
    home = Path(__file__).resolve().parents[1]
    if sys.path and Path(sys.path[0] or ".").resolve() == Path.cwd().resolve() != home:
        del sys.path[0]
    for package in PACKAGES:
        found = _folder_of(package)
        if found is not None and found != home:
            print(
                f"accelrl: error: {found / package} hides accelrl's own package of that name, in {home}; take {found} "
                "out of PYTHONPATH, and name a folder with functions of yours by --user-code-dir",
                file=sys.stderr,
            )
            sys.exit(2)


def _folder_of(package: str) -> Path | None:
    """The folder in which ``import package`` finds it; None if it does not."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:  # a package; else a module file
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    return Path(spec.origin).resolve().parent if spec.origin else None
