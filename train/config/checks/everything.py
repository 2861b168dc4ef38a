"""Makes every check and says together what they found."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from train.config.checks.batch import batch_problems, micro_batch_problems
from train.config.checks.checkpoint import saving_problems
from train.config.checks.debug import debug_problems
from train.config.checks.devices import device_problems, launcher_problems
from train.config.checks.effects import effect_problems
from train.config.checks.evaluation import evaluation_problems
from train.config.checks.learning import correction_problems, learning_rate_problems, reference_problems
from train.config.checks.overlap import overlap_problems
from train.config.checks.paths import model_and_prompt_problems, output_problems
from train.config.checks.profiling import profiling_problems
from train.config.checks.release import release_problems
from train.config.checks.rollout import length_problems, reward_problems, sampling_problems
from train.config.checks.servers import server_problems
from train.config.checks.turns import turn_problems
from train.config.checks.weight_updates import weight_update_problems
from train.config.problems import raise_problems
from train.config.run import RunConfig

CHECKS = (
    device_problems,
    launcher_problems,
    release_problems,
    model_and_prompt_problems,
    sampling_problems,
    overlap_problems,
    length_problems,
    reward_problems,
    server_problems,
    weight_update_problems,
    turn_problems,
    evaluation_problems,
    batch_problems,
    micro_batch_problems,
    learning_rate_problems,
    reference_problems,
    correction_problems,
    output_problems,
    saving_problems,
    debug_problems,
    profiling_problems,
)


def validate(config: RunConfig, given: Collection[str] | None = None, on_command_line: Collection[str] = ()) -> None:
    """Raises InputError, one line for each thing that does not fit; each names the flags and a value that works.

    ``given``: names of the fields that somebody set rather than a base (None: any may have been), ``on_command_line``
    those of them that no file set; they decide whether a value without effect is a mistake. What needs the accelerator,
    the model or the rows of a prompt file is checked where those are opened.
    """
    found = chain.from_iterable(check(config) for check in CHECKS)
    raise_problems([*found, *effect_problems(config, given, on_command_line)])
