"""The plain, validated batch that a collector's groups become before any trainer sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollout.collectors.sync import UserArgs
from rollout.custom.training import converted, load_conversion, load_post_process, post_processed
from samples.errors import InputError
from samples.sample import Group, Sample, Status
from train.advantages import group_advantages

if TYPE_CHECKING:
    from train.config.run import RunConfig


@dataclass(frozen=True)
class TrainBatch:
    """One rollout's samples as columns; entry i of each belongs to sample i. Arrays, so Ray shares them without copies.

    tokens: int32 [prompt + response] each; response_lengths: int32 [n]; loss_masks: bool [response] each, True where a
    token takes gradient; rewards: float64 [n]; advantages: float32 [n], one per response; group_ids: int32 [n];
    sample_indices and weight_versions: -1 where the sample does not say; rollout_log_probs: float32 [response] each, or
    None; kept_token_ids: for each response token the int32 ids that top-p and top-k left (empty: all), or None.
    """

    tokens: list[NDArray[np.int32]]
    response_lengths: NDArray[np.int32]
    loss_masks: list[NDArray[np.bool_]]
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float32]
    group_ids: NDArray[np.int32]
    sample_indices: NDArray[np.int64]
    weight_versions: NDArray[np.int32]
    temperature: float
    rollout_log_probs: list[NDArray[np.float32]] | None = None
    kept_token_ids: list[list[NDArray[np.int32]]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def batch_from_groups(groups: Sequence[Group], config: RunConfig) -> TrainBatch:
    """Columns of the groups that a rollout hands to training, checked once, so that nothing downstream has to guess.

    Advantages are normalised within each group, whatever its size. Samples that are FAILED or ABORTED have no whole
    response to judge: they take no gradient and stay out of their group's mean and deviation. ``remove_sample`` keeps
    the reward in the group's statistics but takes no gradient. Only FAILED and ABORTED may lack a reward.

    Raises InputError, naming the sample, for what cannot be trained on: lengths that disagree, masks that do not fit,
    rewards that are missing or not finite, log-probabilities or kept token ids that are missing where they are needed.
    """
    samples = [sample for group in groups for sample in group]
    given: list[float] | None = None  # advantages that a user's function decides
    if samples and config.rollout.custom_convert_samples_to_train_data_path is not None:
        groups, given = _converted(groups, samples, config)
        samples = [sample for group in groups for sample in group]
    if not samples:
        raise InputError("the rollout handed no samples to training: no group, or only empty ones")
    check = _SampleCheck(config)
    group_ids = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups])
    counted = np.array([check.is_judged(sample) for sample in samples])
    trained = counted & ~np.array([sample.remove_sample for sample in samples])
    rewards = np.array([check.reward(sample, bool(judged)) for sample, judged in zip(samples, counted, strict=True)])
    if config.reward.custom_reward_post_process_path is not None and given is None:
        given = _post_processed(samples, config)
    if given is None:
        normalize_std = config.algorithm.grpo_std_normalization
        advantages = group_advantages(rewards, group_ids, counted, normalize_std=normalize_std)
    else:
        advantages = np.where(counted, np.array(given), 0.0).astype(np.float32)
    if not np.isfinite(advantages).all():
        worst = samples[int(np.argmin(np.isfinite(advantages)))]
        raise InputError(
            f"{check.name(worst)}: its group's rewards are too large to compare (reward {worst.reward!r}); "
            f"scale the rewards of {check.reward_source} down"
        )
    uses = list(zip(samples, trained.tolist(), strict=True))
    return TrainBatch(
        tokens=[check.tokens(sample, use) for sample, use in uses],
        response_lengths=np.array([sample.response_length for sample in samples], dtype=np.int32),
        loss_masks=[check.loss_mask(sample, use) for sample, use in uses],
        rewards=rewards,
        advantages=advantages,
        group_ids=group_ids,
        sample_indices=np.array([-1 if s.index is None else s.index for s in samples], dtype=np.int64),
        weight_versions=np.array(
            [-1 if s.weight_version is None else s.weight_version for s in samples], dtype=np.int32
        ),
        temperature=config.rollout.rollout_temperature,
        rollout_log_probs=check.rollout_log_probs(uses),
        kept_token_ids=check.kept_token_ids(uses),
    )


def _post_processed(samples: list[Sample], config: RunConfig) -> list[float]:
    function = load_post_process(config.reward)
    assert function is not None
    return post_processed(function, UserArgs(config.rollout, config.reward), samples)


def _converted(
    groups: Sequence[Group], samples: list[Sample], config: RunConfig
) -> tuple[list[Group], list[float] | None]:
    function = load_conversion(config.rollout, config.reward)
    assert function is not None
    group_ids = [number for number, group in enumerate(groups) for _ in group]
    return converted(function, UserArgs(config.rollout, config.reward), samples, group_ids)


class _SampleCheck:
    """Turns one field of one sample into its column's entry, or says what is wrong with it."""

    def __init__(self, config: RunConfig) -> None:
        self.reward_key = config.reward.reward_key
        custom = config.reward.custom_rm_path
        self.reward_source = f"--custom-rm-path {custom}" if custom else f"--rm-type {config.reward.rm_type}"
        self.filtered = config.rollout.rollout_top_p < 1 or config.rollout.rollout_top_k > 0
        self.corrects = config.algorithm.use_tis
        self.needs_log_probs = self.corrects or config.algorithm.use_rollout_logprobs is not False

    @staticmethod
    def name(sample: Sample) -> str:
        return f"sample {sample.index} (group {sample.group_index})"

    def is_judged(self, sample: Sample) -> bool:
        """Whether there is a whole response with a reward of its own."""
        if sample.status is Status.PENDING:
            raise InputError(
                f"{self.name(sample)} is still pending: a rollout function must hand over finished samples"
            )
        return sample.status in (Status.COMPLETED, Status.TRUNCATED)

    def reward(self, sample: Sample, judged: bool) -> float:
        if sample.reward is None and not judged:
            return 0.0
        try:
            value = sample.reward_value(self.reward_key)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.name(sample)}: {self.reward_source} gave the reward {sample.reward!r}, which is not a number "
                f"({error}); return a number, or a mapping and set --reward-key"
            ) from error
        if math.isfinite(value):
            return value
        if not judged:
            return 0.0
        raise InputError(
            f"{self.name(sample)}: {self.reward_source} gave the reward {value}; rewards must be finite numbers"
        )

    def tokens(self, sample: Sample, trained: bool) -> NDArray[np.int32]:
        tokens = np.asarray(sample.tokens)
        length = sample.response_length
        if len(tokens) and (tokens.dtype.kind not in "iu" or tokens.ndim != 1 or tokens.min() < 0):
            raise InputError(f"{self.name(sample)}: tokens must be a flat list of token ids from 0")
        if not 0 <= length <= len(tokens):
            raise InputError(f"{self.name(sample)}: response_length is {length} but there are {len(tokens)} tokens")
        if trained and length == len(tokens):
            raise InputError(f"{self.name(sample)}: no prompt token before the response; training needs at least one")
        return tokens.astype(np.int32)

    def loss_mask(self, sample: Sample, trained: bool) -> NDArray[np.bool_]:
        """True where a token takes gradient; all of the response when the sample has no mask."""
        if not trained:
            return np.zeros(max(sample.response_length, 0), dtype=np.bool_)
        if sample.loss_mask is None:
            return np.ones(max(sample.response_length, 0), dtype=np.bool_)
        mask = np.asarray(sample.loss_mask)
        self._fits("loss_mask", mask, sample)
        if not ((mask == 0) | (mask == 1)).all():
            raise InputError(
                f"{self.name(sample)}: loss_mask must hold 0 and 1, found {mask[(mask != 0) & (mask != 1)][0]}"
            )
        return mask.astype(np.bool_)

    def rollout_log_probs(self, uses: list[tuple[Sample, bool]]) -> list[NDArray[np.float32]] | None:
        """None when the rollout gave none and the trainer computes the old policy's itself."""
        missing = next((sample for sample, use in uses if use and sample.rollout_log_probs is None), None)
        if missing is not None:
            if self.needs_log_probs or any(use and sample.rollout_log_probs is not None for sample, use in uses):
                otherwise = (
                    "leave --use-tis out, which compares with them"
                    if self.corrects
                    else "leave them out of all samples and pass --no-use-rollout-logprobs to have the trainer compute "
                    "them"
                )
                raise InputError(
                    f"{self.name(missing)} has no rollout_log_probs; record them in the rollout function, or "
                    f"{otherwise}"
                )
            return None
        return [
            self._log_probs(sample) if use else np.zeros(max(sample.response_length, 0), np.float32)
            for sample, use in uses
        ]

    def _log_probs(self, sample: Sample) -> NDArray[np.float32]:
        values = np.asarray(sample.rollout_log_probs, dtype=np.float32)
        self._fits("rollout_log_probs", values, sample)
        if not (values <= 1e-3).all() or np.isneginf(values).any():
            bad = values[~(values <= 1e-3) | np.isneginf(values)][0]
            raise InputError(f"{self.name(sample)}: {bad} in rollout_log_probs is not the logarithm of a probability")
        return values

    def kept_token_ids(self, uses: list[tuple[Sample, bool]]) -> list[list[NDArray[np.int32]]] | None:
        """None when no token's distribution was filtered."""
        if not self.filtered and all(sample.rollout_kept_token_ids is None for sample, use in uses if use):
            return None
        return [self._kept(sample) if use else [] for sample, use in uses]

    def _kept(self, sample: Sample) -> list[NDArray[np.int32]]:
        if sample.rollout_kept_token_ids is None:
            if self.filtered:
                raise InputError(
                    f"{self.name(sample)} has no rollout_kept_token_ids although --rollout-top-p or --rollout-top-k "
                    "is on, so the trainer cannot tell what was sampled from; use an engine that records them"
                )
            return [np.zeros(0, np.int32)] * sample.response_length
        kept = [np.asarray(ids, dtype=np.int32) for ids in sample.rollout_kept_token_ids]
        if len(kept) != sample.response_length:
            raise InputError(
                f"{self.name(sample)}: rollout_kept_token_ids has {len(kept)} entries for a response of "
                f"{sample.response_length} tokens"
            )
        mask = sample.loss_mask or [1] * sample.response_length
        for position, (token, ids) in enumerate(zip(sample.response_tokens, kept, strict=True)):
            if mask[position] and len(ids) and token not in ids:
                raise InputError(
                    f"{self.name(sample)}: token {token} at response position {position} is not among its kept ids"
                )
        return kept

    def _fits(self, field: str, values: NDArray[np.generic], sample: Sample) -> None:
        if values.shape != (sample.response_length,):
            raise InputError(
                f"{self.name(sample)}: {field} has {len(values)} entries for a response of "
                f"{sample.response_length} tokens"
            )
