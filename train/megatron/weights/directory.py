"""Writing a Hugging Face model directory: safetensors shards, index, config, tokenizer, all at once in place."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from samples.errors import InputError
from train.checkpoint.tensor_files import write_tensors
from train.megatron.weights.partials import before_name, lock, make_partial, partial_name
from train.megatron.weights.planned import PlannedShards, PlannedTensor

_MOST_NAME_BYTES = 255  # of all usual file systems
SHARD_BYTES = 5 * 10**9  # as transformers' save_pretrained cuts them

# What belongs to a model besides weights and config.json: tokenizer, chat template, generation settings, code.
CARRIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*.py",
)


def check_target(directory: str | Path, flag: str = "--save-hf") -> None:
    """Raise InputError unless a model can be written there: the directory must not exist, or be empty."""
    path = Path(directory)
    try:
        if path.is_symlink() and not path.exists():
            raise InputError(f"{flag} {directory}: is a link to {os.readlink(path)}, which is not there; remove it")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{flag} {directory}: it exists and is not an empty directory; name another or remove it")
        parent = path.absolute().parent
        while not parent.exists():
            parent = parent.parent
        # Only an attempt tells: permission bits say nothing of read-only file systems, of quotas, or of /proc.
        os.rmdir(tempfile.mkdtemp(prefix=".accelrl-", dir=parent))
        if len(os.fsencode(partial_name(path))) > _MOST_NAME_BYTES:  # put_aside's is no longer
            raise InputError(f"{flag} {directory}: the name is too long to write beside it; give a shorter one")
    except OSError as error:
        raise InputError(f"{flag} {directory}: cannot be written ({error.strerror}); give a writable place") from error


def holds_only_a_model(directory: str | Path) -> bool:
    """Whether a directory holds a model as ``ModelDirectoryWriter`` writes one, and nothing besides."""
    path = Path(directory)
    if not (path / "config.json").is_file():
        return False
    own = ("config.json", "*.safetensors", "*.safetensors.index.json", *CARRIED)
    return all(file.is_file() and any(file.match(pattern) for pattern in own) for file in path.iterdir())


@contextlib.contextmanager
def put_aside(directory: Path) -> Iterator[None]:
    """Give the name of a model directory to the one that is written in the block; the old one goes once that stands.

    Where the block fails, the old one has its name again.
    """
    old = before_name(directory)
    held = lock(directory)
    try:
        directory.rename(old)
        try:
            yield
        except BaseException:
            if not directory.exists():
                old.rename(directory)
            raise
        shutil.rmtree(old)
    finally:
        os.close(held)


class ModelDirectoryWriter:
    """Collects tensors into shards in a sibling directory, which takes the wanted name once everything is in it.

    Several processes may write one directory: each adds all tensors in the same order, and writes every shard whose
    number is its ``place`` modulo ``writers`` (place None: none). The one of place 0 makes the sibling directory, whose
    path the others take as ``work``, and alone finishes, once all have flushed.
    """

    def __init__(
        self,
        directory: str | Path,
        shard_bytes: int = SHARD_BYTES,
        *,
        place: int | None = 0,
        writers: int = 1,
        work: Path | None = None,
    ) -> None:
        self.target = Path(directory).absolute()
        self.complete = False
        self.non_finite: list[str] = []  # of what this process has to write
        self._shard_bytes = shard_bytes
        self._place = place
        self._writers = writers
        self._names: list[str] = []  # of the shard that is being filled
        self._bytes = 0
        self._pending: dict[Path, dict[str, torch.Tensor]] = {}  # what this process has to write
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._sizes: dict[torch.dtype, int] = {}
        self._held: int | None = None
        self.work = work or self._make_work()

    def share(self, place: int | None, writers: int) -> None:
        """Say before the first tensor who else writes."""
        self._place, self._writers = place, writers

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, on any device; it must keep its value until the shard that it belongs to is written.

        A process holds one shard. They are written when every writer has its own, all at once. Raises OSError.
        """
        size = tensor.numel() * tensor.element_size()
        if self._names and self._bytes + size > self._shard_bytes:
            self._end_shard()
            if len(self._shards) % self._writers == 0:
                self._write()
        if self._place is not None and len(self._shards) % self._writers == self._place:
            part = self._pending.setdefault(self._part(len(self._shards)), {})
            part[name] = tensor.detach().cpu().contiguous()
            if not all_finite(part[name]):
                self.non_finite.append(name)
        self._names.append(name)
        self._bytes += size
        self._count(tensor.dtype, size)

    def _count(self, dtype: torch.dtype, size: int) -> None:
        self._total_bytes += size
        self._sizes[dtype] = self._sizes.get(dtype, 0) + size

    def planned(self, tensors: Iterable[PlannedTensor]) -> PlannedShards:
        """Take all tensors at once, by what they will be; whoever has them puts them into what is returned."""
        shards = PlannedShards(self.work, self._shard_bytes)
        shards.plan(tensors)
        for shard in shards.shards:
            self._shards.append([tensor.name for tensor in shard])
            for tensor in shard:
                self._count(tensor.dtype, tensor.bytes)
        return shards

    def flush(self) -> None:
        """Write what is left of this process's shards; no tensor may follow. Raises OSError."""
        if self._names:
            self._end_shard()
        self._write()

    def finish(self, hf_config: Any, source_dir: str | Path | None, quantization: dict[str, Any] | None = None) -> None:
        """Write what is left, the index, the config and what ``source_dir`` carries; give the directory its name.

        quantization: the config's ``quantization_config``, where tensors were quantised before they came here.
        """
        self.flush()
        self._name_shards()
        config = config_with_dtype(hf_config, source_dir, self._dtype())
        if quantization is not None:
            config["quantization_config"] = quantization
        write_json(self.work / "config.json", config)
        for file in carried_files(source_dir):
            shutil.copyfile(file, self.work / file.name)
        self.complete = True
        if self.target.exists():
            self._make_room()
        os.replace(self.work, self.target)
        self._let_go()

    def abandon(self) -> None:
        """Remove what has been written, unless it is the whole model."""
        if not self.complete:
            shutil.rmtree(self.work, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _dtype(self) -> torch.dtype:
        """Of most of the model that is not quantised; a few buffers may be wider."""
        sizes = {dtype: size for dtype, size in self._sizes.items() if dtype.itemsize > 1} or self._sizes
        return max(sizes, key=lambda dtype: sizes[dtype])

    def _make_room(self) -> None:
        try:
            self.target.rmdir()  # takes an empty directory only
        except OSError as error:
            kept = self.work.rename(self.target.with_name(f"{self.target.name}-{os.getpid()}"))
            raise InputError(f"{self.target} cannot be replaced ({error.strerror}); the model is in {kept}") from error

    def _make_work(self) -> Path:
        work, self._held = make_partial(self.target)
        return work

    def _end_shard(self) -> None:
        self._shards.append(self._names)
        self._names = []
        self._bytes = 0

    def _write(self) -> None:
        pending, self._pending = self._pending, {}
        for part, tensors in pending.items():
            write_tensors(part, tensors)

    def _part(self, number: int) -> Path:
        return self.work / f"part-{number}"

    def _name_shards(self) -> None:
        """How many there are is known only now, and the names tell it."""
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.work / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.work / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_json(self.work / "model.safetensors.index.json", index)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the host has neither NaN nor infinite values, at a tenth of what ``isfinite`` takes."""
    if math.isfinite(tensor.sum()):  # one such value would be left of any sum, which may also overflow by itself
        return True
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def config_with_dtype(hf_config: Any, source_dir: str | Path | None, dtype: torch.dtype) -> dict[str, Any]:
    """The source's own config.json where there is one, with the dtype that the weights really have."""
    config: dict[str, Any]
    if source_dir is None:
        config = hf_config.to_dict()
    else:
        config = json.loads((Path(source_dir) / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # what is written is not quantised
    name = str(dtype).removeprefix("torch.")
    config["dtype"] = name
    if "torch_dtype" in config:  # its name before transformers 5
        config["torch_dtype"] = name
    return config


def carried_files(source_dir: str | Path | None) -> list[Path]:
    """What belongs to the model in ``source_dir`` besides weights and config.json, in a fixed order."""
    if source_dir is None:
        return []
    found = {file for pattern in CARRIED for file in Path(source_dir).glob(pattern) if file.is_file()}
    return sorted(found)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
