"""Makes every check and says together what they found."""

from __future__ import annotations

from itertools import chain

from train.config.checks.batch import batch_problems, micro_batch_problems
from train.config.checks.checkpoint import saving_problems
from train.config.checks.debug import debug_problems
from train.config.checks.devices import device_problems, launcher_problems
from train.config.checks.evaluation import evaluation_problems
from train.config.checks.learning import learning_rate_problems, reference_problems
from train.config.checks.paths import model_and_prompt_problems, output_problems
from train.config.checks.rollout import length_problems, reward_problems, sampling_problems
from train.config.problems import raise_problems
from train.config.run import RunConfig

CHECKS = (
    device_problems,
    launcher_problems,
    model_and_prompt_problems,
    sampling_problems,
    length_problems,
    reward_problems,
    evaluation_problems,
    batch_problems,
    micro_batch_problems,
    learning_rate_problems,
    reference_problems,
    output_problems,
    saving_problems,
    debug_problems,
)


def validate(config: RunConfig) -> None:
    """Raises InputError, one line for each thing that does not fit; each names the flags and a value that works.

    What needs the accelerator, the model or the rows of a prompt file is checked where those are opened.
    """
    raise_problems(list(chain.from_iterable(check(config) for check in CHECKS)))
