"""The built-in example trained with a real SGLang server behind the real router."""

from __future__ import annotations

import json

from tests.rollout.sglang_cases import MARKS
from tests.train.sglang_runs import Comparison, run_watched

pytestmark = MARKS

CHANNELS = ("tensor", "disk", "distributed")
STEPS = 12


def test_after_every_update_over_every_channel_the_server_answers_as_the_embedded_engine(
    tmp_path, monkeypatch, record_property
):
    """One run of twelve steps: four updates by each channel, and the first weights of all."""
    run_dir = tmp_path / "run"
    compare = Comparison(last=STEPS)

    def switch(run, version):
        if version % (STEPS // len(CHANNELS)) == 1:
            run.use_channel(CHANNELS[version // (STEPS // len(CHANNELS))])

    status = run_watched(
        monkeypatch,
        run_dir,
        *("--num-rollout", str(STEPS), "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
        *("--global-batch-size", "64", "--weight-update-channel", "tensor"),
        before_update=switch,
        after_update=compare,
    )
    assert status == 0
    assert compare.versions == list(range(STEPS + 1))
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    # Of stale weights the difference grows with every step, to tenths.
    differences = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    assert max(differences) < 1e-4
    record_property(
        "table",
        f"{STEPS} steps, {len(compare.versions)} updates: greedy tokens equal after each; log-probabilities at most "
        f"{compare.largest:.1e} apart; train_rollout_logprob_abs_diff at most {max(differences):.1e}",
    )
    logs = run_dir / "servers"
    assert {"actor-0-regular-0.log", "router-actor.log"} <= {path.name for path in logs.iterdir()}
    assert not (logs / "weights").exists()
