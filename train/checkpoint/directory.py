"""A directory of checkpoints: one under its final name is whole, whatever else has happened.

A checkpoint is written under a name that begins with ``.tmp-`` and renamed once all of it is on the disk; one that is
to go is renamed back before anything of it is removed. So there is no moment at which ``step_...`` is half a
checkpoint, and the newest one is found by looking: there is no file beside them that could say otherwise.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from train.checkpoint.manifest import MANIFEST, Manifest
from train.checkpoint.tensor_files import sync_directory, write_file

_STEP = re.compile(r"step_(\d{6,})")
_UNFINISHED = ".tmp-"
_LEFTOVER = re.compile(r"\.tmp-(removed-)?step_\d{6,}")


class CheckpointDirectory:
    """``--save DIR``: begins, completes and removes checkpoints in it. One run at a time writes there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The steps of the checkpoints there, oldest first."""
        return checkpoint_steps(self.path)

    def checkpoint(self, step: int) -> Path:
        return self.path / f"step_{step:06d}"

    def begin(self, step: int) -> Path:
        """A new, empty directory to write the checkpoint of ``step`` into. What killed saves left is removed first."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        work = self.path / f"{_UNFINISHED}{self.checkpoint(step).name}"
        work.mkdir()
        return work

    def complete(self, work: Path, manifest: Manifest) -> Path:
        """Check what was written, write the manifest, and give the checkpoint its name. Raises OSError."""
        for name, facts in manifest.files.items():
            _check_written(work / name, facts.bytes)
        document = manifest.model_dump_json(indent=2) + "\n"
        write_file(work / MANIFEST, [document.encode()])
        sync_directory(work)
        target = self.checkpoint(manifest.step)
        if target.exists():  # replacing it would leave a moment without either
            raise FileExistsError(errno.EEXIST, "a checkpoint of this step is there already", str(target))
        os.rename(work, target)
        sync_directory(self.path)
        return target

    def abandon(self, work: Path) -> None:
        """Remove an unfinished checkpoint: on a full disk it takes the room that the rest of the run needs."""
        shutil.rmtree(work, ignore_errors=True)

    def keep(self, newest: int) -> None:
        """Remove all checkpoints but the ``newest`` so many."""
        for step in self.steps()[:-newest]:
            shutil.rmtree(self._retire(self.checkpoint(step)))

    def remove_leftovers(self) -> None:
        """Remove what a kill in the middle of a save, or of a removal, left behind."""
        for path in leftovers(self.path):
            shutil.rmtree(path)

    def _retire(self, checkpoint: Path) -> Path:
        retired = checkpoint.with_name(f"{_UNFINISHED}removed-{checkpoint.name}")
        shutil.rmtree(retired, ignore_errors=True)
        os.rename(checkpoint, retired)
        return retired


def checkpoint_steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in ``directory``, oldest first; none when it does not exist."""
    if not directory.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in directory.iterdir() if (path / MANIFEST).is_file())
    return sorted(int(match[1]) for match in found if match)


def leftovers(directory: Path) -> list[Path]:
    """What saves and removals that did not end left there; nothing that merely begins alike."""
    found = (path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _check_written(path: Path, size: int) -> None:
    """What is to be a checkpoint's file is there, as long as it was written, and readable."""
    there = path.stat().st_size
    if there != size:
        raise OSError(f"{path.name} has {there} bytes on the disk, {size} were written")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, RuntimeError) as error:  # RuntimeError: it cannot be opened at all
            raise OSError(f"{path.name} cannot be read back: {error}") from error
