"""Which sample is trained in which optimizer step, on which data-parallel rank, in which micro-batch. Pure arithmetic:
every rank has the whole batch, computes the same plan and takes its own part of it."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from train.config.sections import BatchConfig

DEFAULT_MICRO_BATCH_SIZE = 128

Indices = NDArray[np.int64]


def optimizer_steps(active: Indices, config: BatchConfig, *, seed: int, rollout_id: int) -> list[Indices]:
    """The samples ``active`` (indices into the batch) dealt to optimizer steps, each step's in rising order.

    Samples are dealt by a permutation of (seed, rollout id), single samples rather than groups, so that every step sees
    many prompts. ``--num-steps-per-rollout`` steps are as even as can be; ``--global-batch-size`` alone gives as many
    steps as it divides the samples into, even as well, so that a short rollout has no tiny last step. With both, a
    rollout that came out smaller than planned takes fewer steps. There is no empty step.
    """
    count = len(active)
    if count == 0:
        return []
    if config.global_batch_size is None:
        steps = config.num_steps_per_rollout or 1
    else:
        steps = max(1, round(count / config.global_batch_size))
        if config.num_steps_per_rollout is not None:
            steps = min(steps, config.num_steps_per_rollout)
    order = np.random.default_rng((seed, rollout_id)).permutation(count)
    return [np.sort(active[part]) for part in np.array_split(order, min(steps, count))]


def balance(samples: Indices, lengths: NDArray[np.int64], parts: int) -> list[Indices]:
    """Deals samples to ``parts`` ranks so that their token counts are close: longest first, to the rank with the least.

    A rank may end with none when there are fewer samples than ranks.
    """
    if parts == 1:
        return [samples]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    load = [(0, part) for part in range(parts)]
    for position in np.argsort(-lengths[samples], kind="stable").tolist():
        tokens, part = heapq.heappop(load)
        dealt[part].append(position)
        heapq.heappush(load, (tokens + int(lengths[samples[position]]), part))
    return [samples[sorted(positions)] for positions in dealt]


def micro_batches(samples: Indices, lengths: NDArray[np.int64], config: BatchConfig) -> list[Indices]:
    """Splits one rank's samples of one step into micro-batches of neighbours in length, longest first.

    Sorting by length keeps padding small. By count (``--micro-batch-size``), or with ``--use-dynamic-batch-size`` as
    many as fit into ``--max-tokens-per-gpu`` once padded to the longest, or packed (``--qkv-format thd``); a longer
    sequence makes a micro-batch alone.
    """
    ordered = samples[np.argsort(-lengths[samples], kind="stable")]
    if not config.use_dynamic_batch_size:
        size = config.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]
    budget = config.max_tokens_per_gpu
    assert budget is not None, "checked by the configuration: --use-dynamic-batch-size needs --max-tokens-per-gpu"
    result, start = [], 0
    while start < len(ordered):
        if config.qkv_format == "thd":
            size = max(1, int(np.searchsorted(np.cumsum(lengths[ordered[start:]]), budget, side="right")))
        else:
            size = max(1, budget // int(lengths[ordered[start]]))
        result.append(ordered[start : start + size])
        start += size
    return result


def plan_step(samples: Indices, lengths: NDArray[np.int64], config: BatchConfig, ranks: int) -> list[list[Indices]]:
    """Micro-batches of one optimizer step for each data-parallel rank, equally many on all of them.

    Collectives inside a forward pass (expert parallelism) pair up only then. A rank with fewer splits its largest; one
    with too few samples gets empty micro-batches, which take part with no weight.
    """
    plan = [micro_batches(part, lengths, config) for part in balance(samples, lengths, ranks)]
    count = max(len(batches) for batches in plan)
    return [_spread(batches, count) for batches in plan]


def _spread(batches: list[Indices], count: int) -> list[Indices]:
    batches = list(batches)
    while len(batches) < count:
        largest = max(range(len(batches)), key=lambda i: len(batches[i]), default=None)
        if largest is None or len(batches[largest]) < 2:
            batches.append(np.zeros(0, np.int64))
            continue
        half = (len(batches[largest]) + 1) // 2
        batches[largest : largest + 1] = [batches[largest][:half], batches[largest][half:]]
    return batches
