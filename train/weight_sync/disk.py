"""The ``disk`` and ``disk_delta`` channels: safetensors in a directory, seen by the engine's side once all is there.

``update-000007/`` holds the tensors, ``model.safetensors.index.json`` as transformers has it, and ``weights.json``
(``plan.Manifest``). A delta holds the tensors that differ from the version before, and names the others.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from samples.errors import InputError, RunError
from train.weight_sync.buckets import Bucket, group_into_buckets
from train.weight_sync.checksums import bytes_of, digest, strong_checksum
from train.weight_sync.leftovers import held_directory, new_name, sweep
from train.weight_sync.plan import Manifest, Offer, Summary, UpdatePlan
from train.weight_sync.sending import Sender, Weights

MANIFEST = "weights.json"
INDEX = "model.safetensors.index.json"
_DIRECTORY_FLAG = "--weight-update-dir"


class DiskSender(Sender):
    """Writes a whole update under another name, and renames it into place."""

    def __init__(self, plan: UpdatePlan) -> None:
        self._plan = plan
        self._delta = plan.channel == "disk_delta"
        self._root: Path | None = None
        self._lock = -1
        self._manifest: Manifest | None = None  # of the last update
        self._last: Path | None = None
        self._number = 0
        self._nbytes = 0

    def open(self) -> Offer:
        parent = Path(self._plan.directory)
        word = new_name()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent)
            self._root, self._lock = held_directory(parent)
            (self._root / "probe").write_text(word, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{_DIRECTORY_FLAG} {parent}: cannot be written ({error.strerror}); give another"
            ) from error
        return Offer(str(self._root / "probe"), word)

    def buckets(self, version: int, held: int | None, weights: Weights) -> Iterator[Bucket]:
        from safetensors import SafetensorError

        before = self._manifest
        builds_on = before if self._delta and before is not None and held == before.version else None
        self._manifest = None  # nothing to build on until this one is written
        self._number += 1
        assert self._root is not None
        partial = self._root / f"update-{self._number:06d}.partial"
        try:
            self._manifest = self._write(partial, version, builds_on, weights)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)  # another try needs its room
            if not isinstance(error, (OSError, SafetensorError)):
                raise
            raise RunError(
                f"{_DIRECTORY_FLAG} {self._plan.directory}: {error}; the weights were not updated"
            ) from error
        yield from ()

    def finish(self, version: int) -> Summary:
        manifest = self._manifest
        assert manifest is not None
        assert manifest.version == version
        names = manifest.tensors | manifest.kept
        return Summary(version, len(names), self._nbytes, digest(names), str(self._last))

    def close(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            os.close(self._lock)

    def _write(self, partial: Path, version: int, before: Manifest | None, weights: Weights) -> Manifest:
        from safetensors.torch import save_file

        known = {} if before is None else before.tensors | before.kept
        final = partial.with_suffix("")
        partial.mkdir()
        files: dict[str, str] = {}
        tensors: dict[str, str] = {}
        kept: dict[str, str] = {}

        def changed() -> Weights:
            for name, tensor in weights:
                host = tensor.detach().cpu().contiguous()
                checksum = strong_checksum(bytes_of(host))
                if known.get(name) == checksum:
                    kept[name] = checksum
                else:
                    tensors[name] = checksum
                    yield name, host

        self._nbytes = 0
        for number, bucket in enumerate(group_into_buckets(changed(), self._plan.bucket_bytes), start=1):
            file = f"model-{number:05d}.safetensors"
            save_file(bucket, partial / file, {"format": "pt"})
            files |= dict.fromkeys(bucket, file)
            self._nbytes += sum(tensor.nbytes for tensor in bucket.values())
        index = {"metadata": {"total_size": self._nbytes}, "weight_map": files}
        (partial / INDEX).write_text(json.dumps(index), encoding="utf-8")
        manifest = Manifest(version, None if before is None else before.version, tensors, kept)
        (partial / MANIFEST).write_text(json.dumps(asdict(manifest)), encoding="utf-8")
        partial.rename(final)
        older, self._last = self._last, final
        if older is not None:  # every engine has the version that it held, or gave up
            shutil.rmtree(older, ignore_errors=True)
        return manifest


class DiskReceiver:
    """Reads one file at a time, and checks every tensor against the manifest."""

    def __init__(self, plan: UpdatePlan, offer: Offer) -> None:
        try:
            found = Path(offer.place).read_text(encoding="utf-8")
        except OSError:
            found = ""
        if found != offer.word:
            raise InputError(
                f"{_DIRECTORY_FLAG} {plan.directory}: the rollout worker does not see there what the trainer wrote, so "
                f"--weight-update-channel {plan.channel} cannot work; give a directory that all machines share, or use "
                "distributed"
            )

    def manifest(self, summary: Summary) -> Manifest:
        assert summary.directory is not None
        try:
            return Manifest(**json.loads((Path(summary.directory) / MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{summary.directory}/{MANIFEST} cannot be read: {error}") from error

    def pull(self, summary: Summary) -> Iterator[Mapping[str, torch.Tensor]]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        assert summary.directory is not None
        directory = Path(summary.directory)
        expected = self.manifest(summary).tensors
        for file in sorted(directory.glob("*.safetensors")):
            try:
                tensors = load_file(file)
            except (SafetensorError, OSError) as error:
                raise RunError(f"{file} is not a whole safetensors file: {error}") from error
            for name, tensor in tensors.items():
                if expected.pop(name, None) != strong_checksum(bytes_of(tensor)):
                    raise RunError(f"{file}: {name} is not what the trainer wrote")
            yield tensors
        if expected:
            raise RunError(f"{directory}: {len(expected)} tensors are missing, such as {next(iter(expected))}")

    def tensors(self, bucket: Bucket) -> Iterator[Mapping[str, torch.Tensor]]:
        raise RuntimeError(f"a disk channel is pulled from; it was handed a bucket of {len(bucket.tensors)} tensors")

    def rest(self) -> None:
        return

    def close(self) -> None:
        return
