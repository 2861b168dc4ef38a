"""Functions and sources that keep a contract, or break one in one way."""

from __future__ import annotations

import numpy as np

from samples import Sample, Status


async def plain_generate(args, sample, sampling_params, *, context):
    return await context.answer(sample)


def not_async(args, sample, sampling_params):
    return sample


async def answers_rollout(args, rollout_id, data_source, *, context):
    return [await context.generate(group) for group in data_source.get_samples(args.rollout_batch_size)]


async def fans_out(args, sample, sampling_params, *, context):
    await context.answer(sample)
    second = Sample(prompt="sub", tokens=[7, 8, 9], response="x", response_length=1, rollout_log_probs=[-1.0])
    second.status = Status.COMPLETED
    return [sample, second]


def marks(args, sample, *, evaluation):
    sample.metadata["hooked"] = evaluation


def ranked(args, samples):
    return np.argsort(np.argsort([len(sample.response) for sample in samples])) / len(samples)


def centred(args, samples):
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    return rewards, [reward - 0.5 for reward in rewards]


def same_samples(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
        "advantages": list(range(len(samples))),
    }


class Counting:
    """Counts upwards, and ends at 50."""

    def __init__(self, args):
        self.args, self.at = args, 0

    def get_samples(self, n):
        first, self.at = self.at, min(self.at + n, 50)
        return [[Sample(prompt=f"{i}=", label=str(i)) for _ in range(2)] for i in range(first, self.at)]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Lacking:
    def __init__(self, args):
        pass

    def get_samples(self, n):
        return []
