"""Reading a Hugging Face directory of safetensors files: memory-mapped, by name and slice."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from samples.errors import InputError
from samples.model_files import read_weight_index
from train.megatron.weights import fp8_blocks, mxfp4
from train.megatron.weights.binding import Shard

STEM = "model"  # of the files' names
READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALES = {"F32", "BF16", "F16", "F8_E8M0"}


class HfCheckpoint:
    """The tensors of a directory by name. A context manager: files are opened when first read, closed together."""

    def __init__(self, directory: str | Path, source: str = "--hf-checkpoint", stem: str = STEM) -> None:
        self.directory = Path(directory)
        self.source = source
        self._single = f"{stem}.safetensors"
        self._index = f"{stem}.safetensors.index.json"
        self.bytes_read = 0
        self._mapped = 0
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        self._block: tuple[int, int] | None = None
        self.file_of = self._locate()

    def __enter__(self) -> HfCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def check_names(self, expected: Iterable[str], optional: Iterable[str], beyond: tuple[str, ...] = ()) -> None:
        """Raise InputError unless the directory holds exactly the expected names, and any of the optional ones.

        beyond: names that begin so are optional too.
        """
        wanted = set(expected)
        missing = sorted(name for name in wanted - self.file_of.keys() if not self._is_mxfp4(name))
        scales = {name + suffix for name in wanted for suffix in (fp8_blocks.SUFFIX, mxfp4.BLOCKS, mxfp4.SCALES)}
        if both := sorted(name for name in wanted & self.file_of.keys() if name + mxfp4.BLOCKS in self.file_of):
            raise InputError(
                f"{self.source} {self.directory}: {both[0]} is there twice, as it is and as MXFP4 blocks "
                f"({both[0]}{mxfp4.BLOCKS}); remove one"
            )
        others = self.file_of.keys() - wanted - set(optional) - scales
        extra = sorted(name for name in others if not name.startswith(beyond))
        if missing:
            raise InputError(
                f"{self.source} {self.directory}: {len(missing)} tensors that this model needs are not there: "
                f"{self._with_nearest(missing, extra or self.file_of)}"
            )
        if extra:
            raise InputError(
                f"{self.source} {self.directory}: {len(extra)} tensors belong to no parameter of this model: "
                + "; ".join(f"{name} in {self.file_of[name]}" for name in extra[:3])
                + _nearest(extra[0], wanted)
                + ". Does config.json describe these weights?"
            )

    def check_shards(self, beyond: tuple[str, ...] = ()) -> None:
        """Raise InputError for a shard that holds a tensor of which the index says nothing, or another file."""
        for file in sorted(set(self.file_of.values())):
            held = self._open(file).keys()
            for name in held:
                said = self.file_of.get(name)
                if said != file and not (said is None and name.startswith(beyond)):
                    also = f"{self._index} says it is in {said}" if said else f"{self._index} does not name it"
                    raise InputError(
                        f"{self.source}: {self.directory / file} holds {name}, but {also}; are the files of two "
                        "checkpoints mixed?"
                    )

    def check(self, name: str, shape: tuple[int, ...]) -> Any:
        """The unread tensor. Raises InputError unless it is there in this shape and in a dtype that holds weights.

        Of a tensor of MXFP4 blocks: the blocks.
        """
        if self._is_mxfp4(name):
            return self._check_mxfp4(name, shape)
        file = self.file_of[name]
        try:
            tensor = self._open(file).get_slice(name)
        except SafetensorError as error:
            raise InputError(
                f"{self.source}: {self.directory / file} does not hold {name}, though {self._index} says so"
            ) from error
        stored = tuple(tensor.get_shape())
        if stored != shape:
            raise InputError(
                f"{self.source}: {name} in {self.directory / file} has shape {list(stored)}, "
                f"the config asks for {list(shape)}"
            )
        if tensor.get_dtype() in fp8_blocks.STORED_DTYPES:
            self._check_scales(name, shape)
        elif name + fp8_blocks.SUFFIX in self.file_of:
            raise InputError(
                f"{self.source}: {name} in {self.directory / file} is stored as {tensor.get_dtype()} and there are "
                f"scales {name}{fp8_blocks.SUFFIX} as of FP8 blocks; are the files of two checkpoints mixed?"
            )
        elif tensor.get_dtype() not in READABLE:
            raise InputError(
                f"{self.source}: {name} in {self.directory / file} is stored as {tensor.get_dtype()}; "
                f"supported are {', '.join(sorted(READABLE))}"
            )
        return tensor

    def dtype(self, name: str, shape: tuple[int, ...]) -> torch.dtype:
        """What ``read`` gives of a tensor; raises as ``check`` does."""
        return READABLE.get(self.check(name, shape).get_dtype(), torch.float32)

    def read(self, shard: Shard) -> torch.Tensor:
        """The part of a tensor that a shard names, in the file's dtype; where the layout allows, a view of the file.

        Of a tensor of FP8 or MXFP4 blocks: float32.
        """
        part = self.check(shard.name, shard.shape)
        if self._is_mxfp4(shard.name):
            return self._read_mxfp4(part, shard)
        if shard.index is not None:
            entry: torch.Tensor = part[shard.index]
            return self._counted(entry)
        along = slice(shard.start, shard.stop)
        tensor: torch.Tensor = part[along] if shard.axis == 0 else part[:, along] if shard.axis == 1 else part[:]
        self._counted(tensor)
        if part.get_dtype() not in fp8_blocks.STORED_DTYPES:
            return tensor
        scales = self._counted(self.read_whole(shard.name + fp8_blocks.SUFFIX))
        row, column = (shard.start if shard.axis == axis else 0 for axis in (0, 1))
        return fp8_blocks.dequantise(tensor, scales, self._block_size(), row=row, column=column)

    def read_whole(self, name: str) -> torch.Tensor:
        """A whole tensor, whatever its shape."""
        tensor: torch.Tensor = self._open(self.file_of[name]).get_tensor(name)
        self._mapped += tensor.numel() * tensor.element_size()
        return tensor

    def can_be_cut(self, name: str) -> bool:
        """Whether a few rows of a tensor cost no more than their share of it: its values are stored as they are."""
        file = self.file_of.get(name)
        return file is not None and self._open(file).get_slice(name).get_dtype() in READABLE

    def let_go(self, beyond: int = 0) -> None:
        """Unmap the files once more than ``beyond`` bytes were read since the last time; they are opened again.

        Mapped pages count as this process's memory, and would in the end be a second copy of all that it reads. No
        tensor that ``read`` has given may be in use.
        """
        if self._mapped > beyond:
            self._stack.close()
            self._files.clear()
            self._mapped = 0

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        self.bytes_read += size
        self._mapped += size
        return tensor

    def _is_mxfp4(self, name: str) -> bool:
        return name not in self.file_of and {name + mxfp4.BLOCKS, name + mxfp4.SCALES} <= self.file_of.keys()

    def _check_mxfp4(self, name: str, shape: tuple[int, ...]) -> Any:
        if len(shape) != 3 or shape[1] % mxfp4.GROUP:
            raise InputError(
                f"{self.source}: {name} of {list(shape)} is stored as MXFP4 blocks in {self.directory}; only experts' "
                f"matrices are, whose input width is a multiple of {mxfp4.GROUP}"
            )
        parts = []
        for suffix, wanted in zip((mxfp4.BLOCKS, mxfp4.SCALES), mxfp4.stored_shapes(shape), strict=True):
            file = self.file_of[name + suffix]
            part = self._open(file).get_slice(name + suffix)
            stored = tuple(part.get_shape())
            if stored != wanted or part.get_dtype() != "U8":
                raise InputError(
                    f"{self.source}: {name}{suffix} in {self.directory / file} has shape {list(stored)} of "
                    f"{part.get_dtype()}; the config asks for {list(wanted)} of U8"
                )
            parts.append(part)
        return parts[0]

    def _read_mxfp4(self, blocks: Any, shard: Shard) -> torch.Tensor:
        name = shard.name + mxfp4.SCALES
        scales = self._open(self.file_of[name]).get_slice(name)
        part = slice(None) if shard.index is None else shard.index
        stored = [self._counted(tensor[part]) for tensor in (blocks, scales)]
        return mxfp4.dequantise(*stored)

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        file, scales = self.file_of[name], name + fp8_blocks.SUFFIX
        if scales not in self.file_of or len(shape) != 2:
            raise InputError(
                f"{self.source}: {name} in {self.directory / file} is stored as FP8 and there are no scales {scales} "
                "for its blocks; is the checkpoint quantised in another way?"
            )
        found = self._open(self.file_of[scales]).get_slice(scales)
        if found.get_dtype() not in SCALES:
            raise InputError(
                f"{self.source}: {scales} in {self.directory / self.file_of[scales]} is stored as {found.get_dtype()}; "
                f"scales of FP8 blocks are {', '.join(sorted(SCALES))}"
            )
        stored = tuple(found.get_shape())
        wanted = fp8_blocks.scale_shape(shape, self._block_size())
        if stored != wanted:
            raise InputError(
                f"{self.source}: {scales} has shape {list(stored)}; blocks of {list(self._block_size())} of a weight "
                f"{list(shape)} ask for {list(wanted)}"
            )

    def _block_size(self) -> tuple[int, int]:
        if self._block is None:
            path = self.directory / "config.json"
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            quantization = config.get("quantization_config")
            if not quantization:
                raise InputError(
                    f"{self.source} {self.directory}: FP8 weights, and config.json has no quantization_config; "
                    "a rollout engine would read them without their scales. Add what the model was published with"
                )
            self._block = fp8_blocks.block_size(quantization, self.source)
        return self._block

    def _locate(self) -> dict[str, str]:
        single = self.directory / self._single
        if single.is_dir():
            raise InputError(f"{self.source}: {single} is a directory; the file of the weights should be there")
        if single.exists():
            return dict.fromkeys(self._open(self._single).keys(), self._single)
        index = self.directory / self._index
        if index.exists():
            return self._read_index(index)
        if not self.directory.is_dir():
            raise InputError(f"{self.source} {self.directory}: there is no such directory")
        for path in (self.directory / self._single, index):
            if path.is_symlink():
                raise InputError(
                    f"{self.source}: {path} is a link to {os.readlink(path)}, which is not there; was a cache's "
                    "directory copied without what its links point to?"
                )
        pickles = sorted(path.name for path in self.directory.glob("*.bin"))
        if pickles:
            raise InputError(
                f"{self.source} {self.directory}: {pickles[0]} is a pickle, which can run code when it is read; only "
                'safetensors files are. If you trust it, convert it: python -c "from transformers import '
                f"AutoModelForCausalLM as M; M.from_pretrained('{self.directory}').save_pretrained('NEW_DIRECTORY')\""
            )
        others = sorted(path.name for kind in ("gguf", "pth", "pt") for path in self.directory.glob(f"*.{kind}"))
        hint = f"; {others[0]} is not read, get the model as Hugging Face safetensors files" if others else ""
        raise InputError(f"{self.source} {self.directory}: neither {self._single} nor {self._index} is there{hint}")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            return read_weight_index(index)
        except InputError as error:
            raise InputError(f"{self.source}: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.directory / file
            try:
                self._files[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                size = path.stat().st_size if path.exists() else 0
                raise InputError(
                    f"{self.source}: {path} ({size} bytes) is not a whole safetensors file: {error}. "
                    "Was the download or copy cut short?"
                ) from error
        return self._files[file]

    def _with_nearest(self, names: list[str], candidates: Iterable[str]) -> str:
        pool = list(candidates)
        shown = "; ".join(f"{name}{_nearest(name, pool)}" for name in names[:3])
        return shown + ("; …" if len(names) > 3 else "")


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (nearest name there: {close[0]})" if close else ""
