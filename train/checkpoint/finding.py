"""From ``--load`` to a checkpoint, or to what the given directory is instead and what to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from samples.errors import InputError
from train.checkpoint.directory import CheckpointDirectory, checkpoint_steps, leftovers
from train.checkpoint.manifest import MANIFEST, Checkpoint, FileFacts, read_manifest
from train.checkpoint.tensor_files import file_checksum

_WITHIN_A_RUN = "checkpoints"  # of an output directory
_MEGATRON = ("*.distcp", "**/*.distcp", ".metadata", "iter_[0-9]*", "latest_checkpointed_iteration.txt", "mp_rank_*")
_PICKLES = ("*.pt", "*.pth", "*.bin", "*.ckpt")
_THREADS = 8


def default_save_directory(output_dir: Path) -> Path:
    """Where a run saves when ``--save`` does not say."""
    return output_dir / _WITHIN_A_RUN


def find_checkpoint(load: str, save_directory: Path | None) -> Checkpoint | None:
    """The checkpoint that ``--load`` means; None for ``auto`` when ``save_directory`` holds none.

    A directory may be a checkpoint, hold checkpoints, or be the output directory of a run that holds some. Raises
    InputError for anything else.
    """
    if load == "auto":
        assert save_directory is not None
        steps = checkpoint_steps(save_directory)
        return _read(CheckpointDirectory(save_directory).checkpoint(steps[-1]), "--load auto:") if steps else None
    given = Path(load).expanduser().absolute()  # workers start in other directories
    if not given.is_dir():
        what = "is a file; give the directory of a checkpoint" if given.exists() else "there is no such directory"
        raise InputError(f"--load {load}: {what}")
    if (given / MANIFEST).is_file():
        return _read(given, "--load")
    for directory in (given, given / _WITHIN_A_RUN):
        steps = checkpoint_steps(directory)
        if steps:
            return _read(CheckpointDirectory(directory).checkpoint(steps[-1]), "--load")
    raise InputError(f"--load {load}: {_what_it_is(given)}")


def check_files(checkpoint: Checkpoint) -> None:
    """Raise InputError unless every file of a checkpoint is there, as long as it was and with the same content."""
    files = checkpoint.manifest.files
    for name, facts in files.items():
        path = checkpoint.directory / name
        if not path.is_file():
            raise InputError(f"--load {checkpoint.directory}: {name} is missing{_instead(checkpoint)}")
        size = path.stat().st_size
        if size != facts.bytes:
            raise InputError(
                f"--load {checkpoint.directory}: {name} has {size} bytes, {facts.bytes} were saved: it was cut short "
                f"or changed{_instead(checkpoint)}"
            )
    with ThreadPoolExecutor(_THREADS) as pool:  # checksums are computed outside Python's lock
        for name, same in pool.map(lambda item: (item[0], _is_unchanged(checkpoint.directory, *item)), files.items()):
            if not same:
                raise InputError(
                    f"--load {checkpoint.directory}: {name} is not what was saved (its checksum differs)"
                    f"{_instead(checkpoint)}"
                )


def _read(directory: Path, source: str) -> Checkpoint:
    return Checkpoint(directory, read_manifest(directory, source))


def _is_unchanged(directory: Path, name: str, facts: FileFacts) -> bool:
    return file_checksum(directory / name) == facts.crc32


def _instead(checkpoint: Checkpoint) -> str:
    """What to do about a damaged checkpoint. Going back to an older one is for the user to decide, not for ``auto``."""
    parent = checkpoint.directory.parent
    older = [step for step in checkpoint_steps(parent) if step < checkpoint.step]
    if not older:
        return "; restore the file, or start anew"
    before = CheckpointDirectory(parent).checkpoint(older[-1])
    return f"; restore the file, or go back to the one before: --load {before}"


def _what_it_is(given: Path) -> str:
    if any(_found(given, _MEGATRON)):
        return (
            "is a checkpoint of Megatron's (torch_dist or the older kind), whose pickles can run code when they are "
            "read and whose state is cut for one layout. Convert its weights to a Hugging Face directory with the "
            "tools of the program that wrote it (slime: tools/convert_torch_dist_to_hf.py) and start from them with "
            "--hf-checkpoint; its optimizer state cannot be taken over"
        )
    if (given / "config.json").is_file() and any(given.glob("*.safetensors")):
        return (
            "is a Hugging Face model directory, not a checkpoint of a run: it has no optimizer state and no place in "
            f"the prompts; to start from its weights give --hf-checkpoint {given}"
        )
    pickle = next(_found(given, _PICKLES), None)
    if pickle is not None:
        return (
            f"holds {pickle.name}, a pickle, which can run code when it is read; checkpoints of a run are safetensors "
            "files. Start from weights in a Hugging Face directory with --hf-checkpoint"
        )
    if leftovers(given):
        return "holds no finished checkpoint: the only save that began there was cut short; start without --load"
    inside = " It is empty." if not any(given.iterdir()) else ""
    return f"is no checkpoint and holds none (no {MANIFEST}, no step_000000 and so on).{inside} Give what --save wrote"


def _found(directory: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    return (path for pattern in patterns for path in directory.glob(pattern))
