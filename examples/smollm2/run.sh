#!/usr/bin/env bash
# The whole example from the root of the repository: model and prompts, a few steps, a question to what came out.
# Prints how long each part took. PYTHON, OUTPUT and further flags of `accelrl train` can be given.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
output=${OUTPUT:-runs/smollm2}

times=()
TIMEFORMAT='%0R s (%0U s of CPU time)'
part() { # NAME COMMAND...: run it, remember how long it took
    local name=$1 took
    shift
    echo "=== $name: $*"
    { took=$({ time "$@" >&3 2>&4; } 2>&1); } 3>&1 4>&2
    times+=("$(printf '%-8s' "$name")$took")
}

[ -f "$output/model/model.safetensors" ] || part prepare "$python" examples/smollm2/prepare.py --output "$output"
run=$output/$(date +%Y%m%d-%H%M%S)
part train "$python" -m train --config examples/smollm2/smollm2.toml \
    --hf-checkpoint "$output/model" --prompt-data "$output/prompts.jsonl" \
    --eval-prompt-data chain_sum "$output/eval_prompts.jsonl" \
    --output-dir "$run" --save-hf "$run/trained" "$@"
part ask "$python" examples/smollm2/ask.py "$run/trained"

echo "=== on $(nproc) cores"
printf '%s\n' "${times[@]}"
