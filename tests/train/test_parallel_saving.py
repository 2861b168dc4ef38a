"""A model directory whose shards several ranks write at once."""

import errno
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from accel.backends.cpu import CpuAccelerator
from tests.train.model_cases import load, on_disk, save_tiny, tiny_config
from train.checkpoint.errors import CheckpointWriteError
from train.config.run import RunConfig
from train.megatron.weights import directory as writing
from train.megatron.weights.directory import ModelDirectoryWriter

LAYOUTS = {
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "data": {},
}
SHARD_BYTES = 20_000


def test_writers_in_turn_write_every_shard_once(tmp_path):
    tensors = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(40)}
    first = ModelDirectoryWriter(tmp_path / "out", 200)
    others = [ModelDirectoryWriter(tmp_path / "out", 200, work=first.work) for _ in range(3)]
    first.share(0, 3)
    for place, other in zip((1, 2, None), others, strict=True):
        other.share(place, 3)
    for name, tensor in tensors.items():
        for writer in (first, *others):
            writer.add(name, tensor)
    assert not (tmp_path / "out").exists()
    for writer in (*others, first):
        writer.flush()
    first.finish(tiny_config("qwen3"), None)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 6
    held = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert {name: file for name, (file, _) in held.items()} == index
    assert all(torch.equal(held[name][1], tensor) for name, tensor in tensors.items())


def save_on_rank(rank: int, root: Path) -> None:
    """Every layout, then what goes wrong; what this rank found is written for the parent to read."""
    from train.megatron.bootstrap import prepare_megatron
    from train.megatron.parallel import join_ranks, leave_ranks

    torch.set_num_threads(1)
    accelerator = CpuAccelerator()
    prepare_megatron(accelerator)
    found: dict[str, object] = {}
    for layout, cut in LAYOUTS.items():
        config = RunConfig.model_validate({"parallel": cut})
        join_ranks(config, accelerator, rank=rank, world_size=2, store_path=str(root / f"store {layout}"))
        try:
            found[layout] = save(root, config, layout)
            if layout == "data":
                found["disk full"] = save(root, config, "disk full", fails=rank == 1)
                found["other node"] = save(root, config, "other node", sees=rank == 0)
        finally:
            leave_ranks(accelerator)
    (root / f"found {rank}").write_bytes(pickle.dumps(found))


def save(root: Path, config: RunConfig, name: str, *, fails: bool = False, sees: bool = True) -> object:
    """How many shards this rank wrote, or what it raised."""
    from train.megatron.weights.saving import save_hf

    loaded = load(root / "in", config)
    written: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:

        def write(path, tensors, real=writing.write_tensors):
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(path)
            return real(path, tensors)

        patch.setattr(writing, "write_tensors", write)
        if not sees:
            patch.setattr(Path, "is_dir", lambda _: False)
        try:
            save_hf(loaded.model, loaded.family, loaded.hf_config, root / name, root / "in", SHARD_BYTES)
        except CheckpointWriteError as error:
            return str(error)
    return len(written)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    root = tmp_path_factory.mktemp("saving")
    model = save_tiny(root / "in", "qwen3")
    mp.spawn(save_on_rank, (root,), nprocs=2)
    return root, on_disk(model), [pickle.loads((root / f"found {rank}").read_bytes()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_write_half_of_the_shards_each(two_ranks, layout):
    root, expected, found = two_ranks
    files = sorted((root / layout).glob("*.safetensors"))
    shards = [rank[layout] for rank in found]
    assert sum(shards) == len(files) > 2
    assert max(shards) - min(shards) <= 1
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    _, notes = AutoModelForCausalLM.from_pretrained(root / layout, output_loading_info=True)
    assert not any(notes.values())


@pytest.mark.slow
def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing(two_ranks):
    root, _, found = two_ranks
    assert "disk full: cannot be written by rank 1 " in found[0]["disk full"]
    assert "disk full: cannot be written (No space left on device)" in found[1]["disk full"]
    assert not [path for path in root.iterdir() if "disk full" in path.name]


@pytest.mark.slow
def test_a_rank_on_another_file_system_writes_nothing_and_nothing_is_missing(two_ranks):
    root, expected, found = two_ranks
    assert found[1]["other node"] == 0
    files = list((root / "other node").glob("*.safetensors"))
    assert found[0]["other node"] == len(files)
    assert {name for file in files for name in load_file(file)} == expected.keys()
