"""``--rm-type math`` and ``--rm-type reasoning_gym``: answers checked by math-verify and by a task's own scorer."""

from __future__ import annotations

import importlib.util
from difflib import get_close_matches
from typing import Any

from rollout.rewards.isolated import IsolatedReward
from samples.errors import InputError
from samples.sample import Sample


class MathReward(IsolatedReward):
    """1.0 when the response's last mathematical answer (a boxed one first) equals the label, else 0.0."""

    def __init__(self, *, timeout: float, concurrency: int) -> None:
        _require("math_verify", "math-verify", "math")
        super().__init__("--rm-type math", "math", timeout=timeout, concurrency=concurrency)

    def _request(self, sample: Sample) -> dict[str, object]:
        if sample.label is None or not str(sample.label).strip():
            raise InputError(f"{self.name}: sample {sample.index} has no label to compare with; check --label-key")
        return {"response": sample.response, "label": str(sample.label).strip()}


class ReasoningGymReward(IsolatedReward):
    """A reasoning-gym task's ``score_answer(answer, entry)``, in [0, 1].

    The task is the one after the colon of ``reasoning_gym:TASK``, else the sample's metadata under ``task`` or
    ``source_dataset`` (which reasoning-gym writes there itself). The entry is ``metadata["entry"]``; else the label
    when it is a mapping; else question, answer and metadata are the sample's prompt, label and metadata. The answer is
    the text of the response's last ``<answer>…</answer>``, or the whole response where there is none.
    """

    def __init__(self, task: str | None, *, timeout: float, concurrency: int) -> None:
        _require("reasoning_gym", "reasoning-gym", "reasoning_gym")
        name = f"--rm-type reasoning_gym:{task}" if task else "--rm-type reasoning_gym"
        super().__init__(name, "reasoning_gym", timeout=timeout, concurrency=concurrency)
        self._tasks = _known_tasks()
        self._task = task
        if task:
            self._check_task(task, self.name)

    def _request(self, sample: Sample) -> dict[str, object]:
        entry = self._entry(sample)
        return {"task": self._task_of(sample, entry), "entry": entry, "response": answer_text(sample.response)}

    def _entry(self, sample: Sample) -> dict[str, Any]:
        given = sample.metadata.get("entry", sample.label)
        entry = given if isinstance(given, dict) else {"question": sample.prompt, "answer": sample.label}
        if "answer" not in entry or (given is None and not sample.metadata):
            raise InputError(
                f"{self.name}: sample {sample.index} has no entry of the task: give the answer as label and "
                'the entry\'s metadata as metadata, or the whole entry as metadata["entry"] or as label'
            )
        whole = {"metadata": sample.metadata, **entry}
        if not isinstance(whole["metadata"], dict):
            raise InputError(f"{self.name}: the entry of sample {sample.index} has metadata that is no mapping")
        if isinstance(whole["answer"], int | float):  # a number in a prompt file; the tasks' own answers are text
            whole["answer"] = str(whole["answer"])
        return whole

    def _task_of(self, sample: Sample, entry: dict[str, Any]) -> str:
        named = self._task or sample.metadata.get("task") or entry["metadata"].get("source_dataset")
        if not isinstance(named, str):
            raise InputError(
                f"{self.name}: sample {sample.index} names no task: use --rm-type reasoning_gym:TASK, or put the "
                "task's name into its metadata as 'task' or 'source_dataset'"
            )
        if named != self._task:
            self._check_task(named, f"{self.name}, sample {sample.index}")
        return named

    def _check_task(self, task: str, where: str) -> None:
        if task not in self._tasks:
            near = get_close_matches(task, self._tasks, n=3) or [*sorted(self._tasks)[:5], "..."]
            raise InputError(f"{where}: reasoning-gym has no task {task!r}; it has {', '.join(near)}")


def answer_text(response: str) -> str:
    """What stands in the last ``<answer>…</answer>`` of ``response``, or all of it, stripped."""
    before, opened, after = response.rpartition("<answer>")
    if opened and "</answer>" in after:
        return after.partition("</answer>")[0].strip()
    # The last opening tag may be a stray one after a whole answer.
    if opened and "</answer>" in before and "<answer>" in before:
        return answer_text(before)
    return response.strip()


def _known_tasks() -> frozenset[str]:
    import reasoning_gym.factory  # here: its 106 tasks take a second to import

    return frozenset(reasoning_gym.factory.DATASETS)


def _require(module: str, distribution: str, rm_type: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InputError(f"--rm-type {rm_type} needs the package {distribution}: pip install {distribution}")
