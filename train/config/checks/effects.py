"""Flags that nothing would come of: a value other than the default is refused where nothing asks for it.

A default says nothing, since a run's config.toml gives every value; nor does a value of a file whose purpose the
command line takes away, as ``--config run.toml --no-use-wandb`` does with the name of a project.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollout.deploy.config import SGLangConfig
from rollout.engines.choice import choose_engine
from rollout.rm_types import RM_TYPES
from train.config.flags import flags
from train.config.offload import OffloadConfig
from train.config.run import RunConfig
from train.config.weights import WeightUpdateConfig

_MAY_GIVE_A_MAPPING = ("remote_rm",)  # besides a function of the user's


@dataclass(frozen=True)
class _Idle:
    """Fields without effect in a configuration, and the fields of which any could give them one."""

    names: tuple[str, ...]
    served: tuple[str, ...]
    why: str


def effect_problems(
    config: RunConfig, given: Collection[str] | None = None, on_command_line: Collection[str] = ()
) -> Iterator[str]:
    """One line for each such flag. ``given``: names of the fields that somebody set (None: any may have been)."""
    for idle in _idle(config):
        taken_away = any(name in on_command_line for name in idle.served)
        for name in idle.names:
            flag = flags()[name]
            value = config.model_dump()[flag.section][name]
            asked_for = (given is None or name in given) and (name in on_command_line or not taken_away)
            if asked_for and value != flag.default:
                yield f"{flag.option}{'' if value is True else f' {value}'}: {idle.why}"


def _idle(config: RunConfig) -> Iterator[_Idle]:
    if not config.tracking.use_wandb:
        tracked = ("wandb_project", "wandb_team", "wandb_group", "wandb_name")
        yield _Idle(tracked, ("use_wandb",), "nothing is logged to Weights & Biases; give --use-wandb too")
    if not config.profiling.profile:
        why = "nothing is profiled; give --profile too"
        yield _Idle(("profile_steps", "profile_what"), ("profile",), why)
    if config.output.output_dir is not None:
        why = "names the default output directory, and --output-dir is given; leave one out"
        yield _Idle(("run_name",), ("output_dir",), why)
    if config.algorithm.kl_loss_coef == 0:
        why = "there is no KL loss to estimate; give --kl-loss-coef above 0 too"
        yield _Idle(("kl_loss_type",), ("kl_loss_coef",), why)
    if not config.algorithm.use_tis:
        why = "nothing is corrected for what the rollout sampled from; give --use-tis too"
        yield _Idle(("tis_clip", "tis_clip_low", "tis_mode", "tis_level"), ("use_tis",), why)
    optimizer = config.optimizer
    if optimizer.optimizer == "stateless-adam":
        why = "--optimizer stateless-adam keeps no moments, so nothing decays; leave it out"
        yield _Idle(("adam_beta1", "adam_beta2"), ("optimizer",), why)
    if optimizer.lr_decay_style == "constant":
        why = "--lr-decay-style constant never decays; give linear or cosine, or leave it out"
        decay = optimizer.lr_decay_iters
        fits = {  # else it is refused for that
            "min_lr": optimizer.min_lr <= optimizer.lr,
            "lr_decay_iters": decay is None or optimizer.lr_warmup_iters < decay,
        }
        yield _Idle(tuple(name for name, sound in fits.items() if sound), ("lr_decay_style",), why)
    if config.checkpoint.save_interval is None:
        why = "only the last step is saved, if any, and the end of the run waits for that; give --save-interval too"
        yield _Idle(("async_save",), ("save_interval",), why)
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        why = "that is a choice of --recompute-granularity full; give it too, or leave it out"
        yield _Idle(("recompute_method", "recompute_num_layers"), ("recompute_granularity",), why)
    if recompute.recompute_granularity != "selective":
        why = "that is a choice of --recompute-granularity selective; give it too, or leave it out"
        yield _Idle(("recompute_modules",), ("recompute_granularity",), why)
    yield from _idle_in_groups(config)
    yield from _idle_in_weights(config)
    yield from _idle_in_turns(config)
    if not config.debug.replays:  # a replay keeps the settings of the run that was recorded
        yield from _idle_in_rollout(config)
        yield from _idle_in_servers(config)
        yield from _idle_in_reward(config)
        yield from _idle_in_evaluation(config)


def _idle_in_groups(config: RunConfig) -> Iterator[_Idle]:
    name, served = ("reload_process_groups",), ("actor_num_nodes", "actor_num_gpus_per_node")
    if config.actor_world_size == 1:
        yield _Idle(name, served, "one trainer device has no collectives with others; leave it out")
    elif config.debug.replays or config.debug.debug_rollout_only:
        served = ("load_debug_rollout_data", "debug_rollout_only")
        yield _Idle(name, served, "this run does not both generate and train, so there is no turn to give back for")


def _idle_in_weights(config: RunConfig) -> Iterator[_Idle]:
    names = tuple(WeightUpdateConfig.model_fields)
    if config.debug.debug_rollout_only:  # a replay keeps the settings of the run that was recorded
        yield _Idle(names, ("debug_rollout_only",), "nothing is trained, so no weights are handed over; leave it out")
    elif not config.debug.replays and not (
        config.weights.weight_update_channel in ("disk", "disk_delta") and choose_engine(config.rollout)[0] == "torch"
    ):
        why = (
            "no weights are written there; give --weight-update-channel disk or disk_delta too (SGLang servers have "
            "--sglang-log-dir)"
        )
        yield _Idle(("weight_update_dir",), ("weight_update_channel",), why)


def _idle_in_turns(config: RunConfig) -> Iterator[_Idle]:
    offload = config.offload
    if config.debug.debug_rollout_only:  # a replay keeps the settings of the run that was recorded
        why = "nothing is trained, so nobody waits for a turn; leave it out"
        yield _Idle(tuple(OffloadConfig.model_fields), ("debug_rollout_only",), why)
    elif not config.debug.replays:
        asking = ("colocate", "offload", "offload_train")
        if not offload.offloads_trainer:
            why = "the trainer keeps its memory; give --offload-train, --offload or --colocate too"
            yield _Idle(("offload_dir", "check_offload_equal"), asking, why)
        if not (offload.offloads_trainer or offload.offloads_rollout):
            why = "nobody gives memory back; give --offload or --colocate too"
            yield _Idle(("offload_timeout",), (*asking, "offload_rollout"), why)
        if offload.offload_train is False and not (offload.offload or offload.colocate):
            yield _Idle(("offload_train",), asking, "it is off without --offload or --colocate; leave it out")
        if offload.offload_rollout is False and not (offload.offload or offload.colocate):
            yield _Idle(("offload_rollout",), asking, "it is off without --offload or --colocate; leave it out")


def _idle_in_rollout(config: RunConfig) -> Iterator[_Idle]:
    rollout = config.rollout
    if rollout.rollout_mode != "fully-async":
        why = (
            f"--rollout-mode {rollout.rollout_mode} has no use for it; give --rollout-mode fully-async, or leave it out"
        )
        overlapped = ("max_weight_staleness", "max_groups_in_flight", "max_group_retries")
        yield _Idle(overlapped, ("rollout_mode",), why)
        why = f"--rollout-mode {rollout.rollout_mode} generates nothing while weights are updated; leave it out"
        yield _Idle(("pause_generation_mode",), ("rollout_mode",), why)
    else:
        why = "--rollout-mode fully-async keeps every finished group for the next step anyway; leave it out"
        yield _Idle(("keep_surplus_groups",), ("rollout_mode",), why)
        if rollout.max_weight_staleness == 0:
            why = "with --max-weight-staleness 0 nothing is generated while weights are updated; leave one out"
            yield _Idle(("pause_generation_mode",), ("max_weight_staleness",), why)
    if rollout.rollout_mode == "fully-async" and rollout.pause_generation_mode in ("retract", "in_place"):
        mode = rollout.pause_generation_mode
        why = f"--pause-generation-mode {mode} aborts no response that could go on later; leave one out"
        yield _Idle(("partial_rollout",), ("pause_generation_mode",), why)
    hook = ("rollout_sample_hook_path",)
    droppers = ("dynamic_sampling_filter_path", "rollout_sample_hook_path", "rollout_function_path")
    drops = rollout.dynamic_sampling_filter_path or rollout.rollout_sample_hook_path or rollout.rollout_function_path
    if not drops:
        why = "nothing drops groups, so one round always does; give --dynamic-sampling-filter-path too"
        yield _Idle(("max_sampling_rounds", "on_sampling_exhausted"), droppers, why)
    if not rollout.partial_rollout:
        why = "no response goes on that older weights began; give --partial-rollout too"
        yield _Idle(("mask_offpolicy_in_partial_rollout",), ("partial_rollout",), why)
    if rollout.rollout_mode != "fully-async":
        if rollout.over_sampling_batch_size is None:
            why = "without --over-sampling-batch-size every response is waited for and none is aborted; give it too"
            yield _Idle(("partial_rollout",), ("over_sampling_batch_size",), why)
        makers = ("over_sampling_batch_size", "rollout_function_path", *droppers)
        if not any(getattr(rollout, name) for name in makers):
            why = "no more groups are drawn than a step needs; give --over-sampling-batch-size or a filter too"
            yield _Idle(("keep_surplus_groups",), makers, why)
    if not rollout.rollout_sample_hook_path:
        why = "there is no sample hook that could fail; give --rollout-sample-hook-path too"
        yield _Idle(("rollout_sample_hook_on_error",), hook, why)


def _idle_in_servers(config: RunConfig) -> Iterator[_Idle]:
    if choose_engine(config.rollout)[0] != "sglang":
        why = "there are no SGLang servers; give --rollout-engine sglang, or leave it out"
        yield _Idle(tuple(SGLangConfig.model_fields), ("rollout_engine",), why)


def _idle_in_reward(config: RunConfig) -> Iterator[_Idle]:
    reward, served = config.reward, ("rm_type", "custom_rm_path")
    kind = reward.rm_type.partition(":")[0]
    if reward.custom_rm_path is not None or kind not in RM_TYPES:  # a function may use them for itself
        return
    if kind not in _MAY_GIVE_A_MAPPING:
        why = f"--rm-type {reward.rm_type} gives a number, which has no entries; give --custom-rm-path or leave it out"
        yield _Idle(("reward_key",), served, why)
    if kind != "remote_rm":
        why = f"--rm-type {reward.rm_type} calls no service; give --rm-type remote_rm or leave it out"
        yield _Idle(("rm_retries",), served, why)


def _idle_in_evaluation(config: RunConfig) -> Iterator[_Idle]:
    example = config.model.hf_checkpoint is None and not config.data.prompt_data  # it brings its own prompts
    if config.evaluation.eval_prompt_data or example:
        return
    names = (
        "skip_eval_before_train",
        "eval_temperature",
        "eval_top_p",
        "eval_top_k",
        "eval_max_response_len",
        "eval_max_prompt_len",
        "eval_input_key",
        "eval_label_key",
        "eval_pass_threshold",
    )
    why = "there are no prompts to evaluate on; give --eval-prompt-data NAME FILE too"
    yield _Idle(names, ("eval_prompt_data",), why)
