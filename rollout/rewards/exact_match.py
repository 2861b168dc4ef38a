"""``--rm-type exact_match``: 1.0 when the response is the label, 0.0 otherwise."""

from __future__ import annotations

from rollout.rewards.base import Reward
from samples.errors import InputError
from samples.sample import Group, Sample
from samples.sample import Reward as RewardValue


class ExactMatchReward(Reward):
    """Compares text after stripping white space at both ends; upper and lower case differ.

    A label that is not text is compared as ``str(label)``; a float that is a whole number, as which Parquet files give
    whole numbers beside nulls, also without its fraction: 2.0 is matched by "2" and by "2.0".
    """

    def __init__(self) -> None:
        super().__init__("--rm-type exact_match")

    def _match(self, sample: Sample) -> float:
        if sample.label is None:
            raise InputError(
                f"{self.name}: sample {sample.index} has no label to compare with; "
                "check --label-key, or choose another --rm-type"
            )
        if isinstance(sample.label, (list, dict)):
            raise InputError(
                f"{self.name}: the label of prompt row {sample.prompt_row} (sample {sample.index}) is a "
                f"{type(sample.label).__name__}, which no response equals; --label-key must name text or a number, or "
                "choose another --rm-type"
            )
        sample.reward = float(sample.response.strip() in _spellings(sample.label))
        return sample.reward

    async def score(self, sample: Sample) -> float:
        return self._match(sample)

    async def score_group(self, group: Group) -> list[RewardValue]:
        return [self._match(sample) for sample in group]  # no task per sample: this is the hot path of small models


def _spellings(label: object) -> tuple[str, ...]:
    if isinstance(label, float) and label.is_integer():
        return str(label), str(int(label))
    return (str(label).strip(),)
