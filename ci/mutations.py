"""Faults of a port, planted one by one in a copy of the tree: each must make a test on the emulated device fail.

    python ci/mutations.py [NAME]...

A check that never fails proves nothing. Ends with 1 when a fault goes unnoticed, or no longer fits the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMULATION = "tests/accel/test_emulation.py"
LOOP = "tests/train/test_emulated_loop.py"


@dataclass(frozen=True)
class Mutation:
    """``right`` stands once in ``file``; with ``wrong`` in its place, ``test`` fails."""

    file: str
    right: str
    wrong: str
    test: str


MUTATIONS = {
    "device lookup of the trainer hard-coded": Mutation(
        "train/megatron/trainer.py",
        "self._device = accelerator.device()",
        'import torch; self._device = torch.device("cpu")',
        f"{LOOP}::test_policy_and_engine_live_on_the_device",
    ),
    "device lookup of the engine hard-coded": Mutation(
        "rollout/engines/torch_engine/engine.py",
        "device=self._accelerator.device(self._device_index)",
        'device=torch.device("cpu")',
        f"{LOOP}::test_policy_and_engine_live_on_the_device",
    ),
    "training groups on gloo": Mutation(
        "accel/backends/musa.py",
        'train_backend = "mccl"',
        'train_backend = "gloo"',
        f"{EMULATION}::test_collectives_of_two_ranks",
    ),
    "weight-update groups on gloo": Mutation(
        "accel/backends/musa.py",
        'weight_update_backend = "cpu:gloo,musa:mccl"',
        'weight_update_backend = "gloo"',
        f"{EMULATION}::test_collectives_of_two_ranks",
    ),
    "visible ids taken for indices": Mutation(
        "accel/visibility.py",
        "return visible_devices(accelerator).local_index(_device_id(physical))",
        "return int(_device_id(physical))",
        f"{EMULATION}::test_the_visible_list_is_honoured_and_ids_are_mapped_through_it",
    ),
    "no synchronise before a host read": Mutation(
        "accel/conformance/checks/test_numerics.py",
        "    accelerator.synchronize()\n    assert torch.equal(back, source)",
        "    assert torch.equal(back, source)",
        f"{EMULATION}::test_conformance_where_copies_come_late",
    ),
    "synchronise does nothing": Mutation(
        "accel/backends/torch_device.py",
        "        self.module.synchronize(self.device(index))",
        "        return",
        f"{EMULATION}::test_copies_come_late_where_that_is_asked_for",
    ),
}


def main() -> int:
    names = sys.argv[1:] or list(MUTATIONS)
    unnoticed = [name for name in names if not noticed(name, MUTATIONS[name])]
    print(f"{len(names) - len(unnoticed)} of {len(names)} faults make a test fail")
    return 1 if unnoticed else 0


def noticed(name: str, mutation: Mutation) -> bool:
    with tempfile.TemporaryDirectory(prefix="accelrl-mutation-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
        path = tree / mutation.file
        source = path.read_text()
        if source.count(mutation.right) != 1:
            print(
                f"GONE  {name}: {mutation.file} has {mutation.right!r} {source.count(mutation.right)} times", flush=True
            )
            return False
        path.write_text(source.replace(mutation.right, mutation.wrong))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "slow or emulated", mutation.test]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    failed = done.returncode == 1
    last = [line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED"))][:1] or [done.stdout[-200:]]
    print(f"{'ok   ' if failed else 'ALIVE'} {name}: {last[0][:150]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
