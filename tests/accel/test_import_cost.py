"""Importing the layer is cheap, touches no device and loads no vendor."""

import re
import subprocess
import sys

SHARE = 0.3  # seconds of our own, beyond what torch takes


def fresh(code, *flags):
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_importing_accel_loads_neither_torch_nor_anything_else_of_ours():
    code = "import sys, accel; print(*sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'ray', 'accel')))"
    assert fresh(code).stdout.split() == ["accel"]


def test_using_accel_loads_no_ray_no_megatron_and_no_pytest():
    code = (
        "import sys, accel, accel.comm, accel.visibility, accel.placement.requests, accel.memory.saver\n"
        "import accel.memory.deep_ep, accel.comm.teardown\n"
        "accel.select_accelerator('cpu')\n"
        "print(sorted({'ray', 'megatron', 'pytest', 'transformers'} & set(sys.modules)))"
    )
    assert fresh(code).stdout.strip() == "[]"


def test_our_own_share_of_the_import_time_is_small():
    report = fresh("import accel, accel.registry, accel.comm", "-X", "importtime").stderr
    own = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(accel\S*)", report)
    assert {"accel", "accel.registry", "accel.contract"} <= {name for _, name in own}
    assert sum(int(microseconds) for microseconds, _ in own) < SHARE * 1e6


def test_importing_and_selecting_the_cpu_creates_no_device_context():
    code = "import torch, accel; accel.select_accelerator('cpu'); print(torch.cuda.is_initialized())"
    assert fresh(code).stdout.strip() == "False"
