#!/usr/bin/env bash
# What one CUDA GPU must show, in about ten minutes: bash ci/cuda_check.sh [DIRECTORY FOR RESULTS]
# It has not run on hardware yet: what it asserts is known on the CPU and on the emulated device only.
#
# Every check ends as PASS, FAIL or NOT RUN with what it lacks (a package, a feature of this version): nothing is left
# out silently. Status 1 when one failed, or when no device is there. PYTHON names the interpreter (default: python).
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
out=${1:-$(mktemp -d)}
mkdir -p "$out"
results=()
failed=0

has() { "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))" "$@"; }

check() { # NAME "PACKAGES THAT IT NEEDS" COMMAND...
    local name=$1 needs=$2 start=$SECONDS missing="" status
    shift 2
    for package in $needs; do has "$package" || missing+=" $package"; done
    if [ -n "$missing" ]; then
        results+=("NOT RUN  $name: lacks$missing")
        return
    fi
    echo "=== $name: $*"
    "$@" > "$out/$name.log" 2>&1
    status=$?
    tail -n 15 "$out/$name.log"
    if [ $status -eq 0 ]; then
        results+=("PASS     $name ($((SECONDS - start)) s)")
    else
        results+=("FAIL     $name (status $status after $((SECONDS - start)) s, see $out/$name.log)")
        failed=1
    fi
}

with_module() { # MODULE NAME "PACKAGES" COMMAND...: where this version of the tree has the module
    local module=$1
    shift
    if [ -f "${module//.//}.py" ]; then
        check "$@"
    else
        results+=("NOT RUN  $1: $module is not available yet")
    fi
}

train() { "$python" -m train --accelerator cuda "$@"; }
loop="torch megatron transformers" # what one process needs; the default launcher needs ray too

check doctor torch "$python" -m accel doctor --accelerator cuda
check conformance "torch pytest" "$python" -m accel conformance --accelerator cuda --world-size 1
check example "$loop" train --launcher inline --output-dir "$out/example"
check example-ray "$loop ray" train --num-rollout 3 --actor-num-gpus-per-node 1 --output-dir "$out/example-ray"
check save "$loop" train --launcher inline --num-rollout 4 --output-dir "$out/first" --save "$out/checkpoints" --save-interval 2
check resume "$loop" train --launcher inline --num-rollout 8 --output-dir "$out/second" --load "$out/checkpoints"
check decode-benchmark "torch transformers" "$python" -m benchmarks.decode --accelerator cuda
check step-benchmark "$loop" "$python" -m benchmarks.train_step --accelerator cuda
with_module accel.memory.deep_ep memory-saver "torch torch_memory_saver" "$python" ci/memory_saver_check.py --accelerator cuda
with_module accel.comm.reload group-reload torch "$python" ci/group_reload_check.py --accelerator cuda
check colocated "$loop ray" train --colocate --offload --check-offload-equal --check-weight-update-equal --num-rollout 4 --output-dir "$out/colocated"

echo "=== results ($out)"
printf '%s\n' "${results[@]}"
grep -q "^PASS" <<< "$(printf '%s\n' "${results[@]}")" || failed=1
exit $failed
