"""How new weights reach the servers: whole tensors under Hugging Face names, bucket by bucket."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import dumps  # SGLang's format of tensors in a request; nothing is ever read with it
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollout.engines.errors import EngineError
from rollout.engines.sglang.server import SGLangServer, all_of
from samples.errors import InputError

_REQUEST_BYTES = 64 * 1024 * 1024  # tensors in one request; base64 makes a third more of them


class WeightChannel(Protocol):
    """One way. ``send`` gets each bucket once; ``finish`` returns when every server holds ``version``."""

    async def begin(self, servers: Sequence[SGLangServer]) -> None: ...

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    async def finish(self, version: str) -> None: ...

    async def reload(self, server: SGLangServer) -> bool:
        """Give a server that was started again the weights of the last ``finish``; False where they are not kept."""
        ...

    def close(self) -> None: ...


class DiskChannel:
    """Through a directory that the servers can read; it stays until the next version is on every server.

    ``model_dir``: where config and tokenizer come from. ``flush``: whether servers drop their caches with each version.
    """

    def __init__(self, root: Path, model_dir: Path, *, flush: bool = True) -> None:
        self._root, self._model_dir, self._flush = root, model_dir, flush
        self._servers: Sequence[SGLangServer] = ()
        self._directory: Path | None = None
        self._files: dict[str, str] = {}
        self._current: tuple[Path, str] | None = None
        self._number = 0

    async def begin(self, servers: Sequence[SGLangServer]) -> None:
        self._servers, self._files = servers, {}
        await self._discard()  # of an update that failed at a server
        self._number += 1
        self._directory = self._root / f"update-{self._number:06d}"
        await asyncio.to_thread(self._make, self._directory)

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._directory is not None
        name = f"model-{len(set(self._files.values())):05d}.safetensors"
        whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        try:
            await asyncio.to_thread(save_file, whole, self._directory / name, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            path = self._directory / name
            await self._discard()  # another try needs its room
            raise EngineError(f"{path}: the weights for the servers cannot be written: {error}") from error
        self._files |= dict.fromkeys(tensors, name)

    async def finish(self, version: str) -> None:
        assert self._directory is not None
        index = {"metadata": {}, "weight_map": self._files}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        directory, flush = self._directory, self._flush
        await all_of(*(server.update_from_disk(directory, version, flush=flush) for server in self._servers))
        before, self._current, self._directory = self._current, (self._directory, version), None
        if before is not None:
            await asyncio.to_thread(shutil.rmtree, before[0])

    async def reload(self, server: SGLangServer) -> bool:
        if self._current is None:
            return False
        await server.update_from_disk(*self._current)
        return True

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    async def _discard(self) -> None:
        unfinished, self._directory = self._directory, None
        if unfinished is not None:
            await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)

    def _make(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed
        directory.mkdir(parents=True)
        for file in self._model_dir.iterdir():
            if file.is_file() and not file.name.startswith("model") and file.suffix not in (".safetensors", ".bin"):
                (directory / file.name).symlink_to(file.resolve())


class TensorChannel:
    """In the requests themselves, for servers without a common directory. The last version is kept in host memory."""

    def __init__(self, *, flush: bool = True) -> None:
        self._flush = flush
        self._servers: Sequence[SGLangServer] = ()
        self._coming: dict[str, torch.Tensor] = {}
        self._current: tuple[dict[str, torch.Tensor], str] | None = None

    async def begin(self, servers: Sequence[SGLangServer]) -> None:
        self._servers, self._coming = servers, {}
        await all_of(*(server.begin_update() for server in servers))

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self._coming |= kept
        await self._deliver(self._servers, kept)

    async def finish(self, version: str) -> None:
        await self._name(self._servers, version, self._coming)
        self._current = (self._coming, version)

    async def reload(self, server: SGLangServer) -> bool:
        if self._current is None:
            return False
        tensors, version = self._current
        await server.begin_update()
        await self._deliver([server], tensors)
        await self._name([server], version, tensors)
        return True

    def close(self) -> None:
        self._current, self._coming = None, {}

    async def _deliver(self, servers: Sequence[SGLangServer], tensors: Mapping[str, torch.Tensor]) -> None:
        for part in _parts(tensors):
            packed = await asyncio.to_thread(_packed, part)
            await all_of(*(server.update_from_tensors(packed, None, flush=False) for server in servers))

    async def _name(self, servers: Sequence[SGLangServer], version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """The version travels with a tensor: the smallest is sent once more; with it caches are dropped, if at all."""
        name = min(tensors, key=lambda key: tensors[key].numel())
        packed = _packed([(name, tensors[name])])
        await all_of(*(server.update_from_tensors(packed, version, flush=self._flush) for server in servers))
        await all_of(*(server.end_update() for server in servers))


class ExpectedWeights:
    """Names and shapes of the checkpoint; SGLang itself passes over names that it does not know."""

    def __init__(self, model_dir: Path) -> None:
        self._shapes = tensor_shapes(model_dir)
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        if config.get("tie_word_embeddings"):
            self._shapes.pop("lm_head.weight", None)  # the embedding, which some checkpoints hold twice
        self._missing: set[str] = set()

    def begin(self) -> None:
        self._missing = set(self._shapes)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises InputError for a name that is not the model's, another shape, and one that came before."""
        for name, tensor in tensors.items():
            if name not in self._shapes:
                raise InputError(f"the model has no weight {name!r}")
            if tuple(tensor.shape) != self._shapes[name]:
                raise InputError(f"{name}: shape {tuple(tensor.shape)}, the model's is {self._shapes[name]}")
            if name not in self._missing:
                raise InputError(f"{name}: given twice in one update")
            self._missing.remove(name)

    def check_whole(self) -> None:
        if self._missing:
            some = ", ".join(sorted(self._missing)[:5])
            raise EngineError(f"{len(self._missing)} weights did not arrive: {some}; the update is not committed")


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a Hugging Face directory, from the headers of its safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    if not shapes:
        raise InputError(f"{model_dir}: no safetensors files there")
    return shapes


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    part: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > _REQUEST_BYTES:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part


def _packed(named: list[tuple[str, torch.Tensor]]) -> str:
    return base64.b64encode(dumps(named)).decode()
