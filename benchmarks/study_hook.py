"""A sample hook that notes, rollout by rollout and digit by digit, how sure the policy is and how often it is right.

For ``--rollout-sample-hook-path benchmarks.study_hook.note``; ``example_study.py`` reads what it writes, one JSON line
a rollout, into the file that ``ACCELRL_STUDY_FILE`` names. It changes nothing about the samples.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

from samples import Sample

FILE_VARIABLE = "ACCELRL_STUDY_FILE"


class Notebook:
    """Sums of the rollout under way; ``close`` or the next rollout writes them down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rollout: int | None = None
        self._digits: dict[str, list[float]] = {}

    def add(self, sample: Sample, rollout_id: int) -> None:
        if rollout_id != self._rollout:
            self.close()
            self._rollout = rollout_id
        sums = self._digits.setdefault(sample.label, [0, 0, 0, 0.0])
        sums[0] += 1
        sums[1] += sample.response.strip() == sample.label
        sums[2] += sample.response_length
        sums[3] -= sum(sample.rollout_log_probs or ())

    def close(self) -> None:
        if self._rollout is None:
            return
        names = ("samples", "right", "tokens", "surprise")  # surprise: sum of -log p, an estimate of tokens x entropy
        digits = {digit: dict(zip(names, sums, strict=True)) for digit, sums in sorted(self._digits.items())}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"rollout": self._rollout, "digits": digits}) + "\n")
        self._rollout, self._digits = None, {}


_notebook: Notebook | None = None


def note(_args: Any, sample: Sample, *, rollout_id: int) -> None:
    """The hook."""
    global _notebook
    if _notebook is None:
        _notebook = Notebook(Path(os.environ[FILE_VARIABLE]))
        atexit.register(_notebook.close)
    _notebook.add(sample, rollout_id)
