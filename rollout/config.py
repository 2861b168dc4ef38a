"""Settings of generation, sampling and rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.engines.pausing import PauseMode

INHERIT = "inherit"  # the word for "as in training"


class RolloutConfig(BaseModel):
    """Rollout"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_engine: Literal["auto", "torch", "sglang"] = Field(
        "auto",
        description="who generates: the embedded engine (torch) or SGLang servers (auto: sglang if installed)",
    )
    rollout_mode: Literal["sync", "one-step-off", "fully-async"] = Field(
        "sync",
        description="how rollout and training follow each other: in turn, the next rollout beside the training on the "
        "last one, or generation that never waits for training",
    )
    max_weight_staleness: int = Field(
        1,
        ge=0,
        description="weight versions between a group's oldest token and the training on it, at most, with "
        "--rollout-mode fully-async (0: nothing is generated while training)",
    )
    max_groups_in_flight: int | None = Field(
        None,
        ge=1,
        description="groups that --rollout-mode fully-async generates and scores at once (default: all that "
        "--max-weight-staleness allows)",
    )
    max_group_retries: int = Field(
        2,
        ge=0,
        description="times that --rollout-mode fully-async tries a group again whose generation or reward failed, "
        "before the run ends on its error",
    )
    pause_generation_mode: Literal["auto", "abort", "retract", "in_place"] = Field(
        "auto",
        description="what --rollout-mode fully-async does with responses under way when new weights come: they are "
        "aborted and begin again; go on, their KV cache computed anew; or go on with the old KV cache (auto: retract, "
        "where the engine can)",
    )
    partial_rollout: bool = Field(
        False, description="an aborted response goes on later from where it stopped, instead of beginning again"
    )
    rollout_batch_size: int = Field(32, ge=1, description="groups (prompts) that one step trains on")
    n_samples_per_prompt: int = Field(16, ge=1, description="responses in a group")
    over_sampling_batch_size: int | None = Field(
        None,
        ge=1,
        description="groups drawn in every sampling round of a run with a filter or sample hook (default: "
        "--rollout-batch-size, then what is still missing); the prompts of surplus groups are drawn again next",
    )
    rollout_max_response_len: int = Field(256, ge=1, description="longest response, in tokens")
    rollout_min_response_len: int = Field(
        0,
        ge=0,
        description="shortest response, in tokens; end tokens are masked until then, but log-probabilities and so the "
        "importance ratio are those of the unmasked distribution",
    )
    rollout_max_context_len: int | None = Field(
        None, ge=2, description="longest prompt plus response, in tokens (default: the model's max_position_embeddings)"
    )
    rollout_temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="sampling temperature")
    rollout_top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="nucleus sampling")
    rollout_top_k: int = Field(-1, ge=-1, description="sample among the k likeliest tokens (-1: all)")
    rollout_stop: tuple[str, ...] = Field((), description="strings that end a response; kept in it")
    rollout_stop_token_ids: tuple[int, ...] = Field((), description="token ids that also end a response")
    dynamic_sampling_filter_path: str | None = Field(
        None, description="module.function that decides which groups are worth training on"
    )
    max_sampling_rounds: int = Field(20, ge=1, description="rounds after which --on-sampling-exhausted decides")
    on_sampling_exhausted: Literal["fallback", "shrink", "raise"] = Field(
        "raise", description="fill up with dropped groups, train on fewer groups, or stop"
    )
    rollout_sample_hook_path: tuple[str, ...] = Field(
        (), description="module.function applied to every sample between generation and reward; repeatable"
    )
    rollout_sample_hook_on_error: Literal["raise", "drop", "fail-sample"] = Field(
        "raise", description="what a failing sample hook does"
    )
    mask_offpolicy_in_partial_rollout: bool = Field(
        False, description="with --partial-rollout, tokens that older weights wrote take no gradient"
    )
    keep_surplus_groups: bool = Field(
        False,
        description="finished groups that a step has no room for are trained on in the next one, instead of their "
        "prompts being answered anew",
    )
    custom_generate_function_path: str | None = Field(
        None,
        description="module.function(args, sample, sampling_params, *, context, evaluation), async: answers a "
        "sample in the engine's place",
    )
    rollout_function_path: str | None = Field(
        None,
        description="module.function(args, rollout_id, data_source, *, context), async: makes the groups of a sampling "
        "round; hooks, rewards and the filter follow",
    )
    custom_convert_samples_to_train_data_path: str | None = Field(
        None, description="module.function(args, samples): the columns of the training batch"
    )
    engine_max_running_requests: int = Field(512, ge=1, description="requests that the embedded engine decodes at once")
    engine_max_total_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens in the embedded engine's KV cache (default: as many as the running requests need)",
    )

    @property
    def pause_mode(self) -> PauseMode:
        """What is asked of the engine; tokens that take no gradient are told apart where a response was aborted."""
        if self.pause_generation_mode != "auto":
            return PauseMode(self.pause_generation_mode)
        return PauseMode.ABORT if self.mask_offpolicy_in_partial_rollout else PauseMode.RETRACT


class RewardConfig(BaseModel):
    """Reward"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rm_type: str = Field(
        "exact_match",
        description="exact_match, math, remote_rm, reasoning_gym:TASK (or reasoning_gym: the metadata names the task)",
    )
    rm_url: str | None = Field(None, description="address of the reward service for --rm-type remote_rm")
    rm_timeout: float = Field(60.0, gt=0, allow_inf_nan=False, description="seconds that one reward may take")
    rm_concurrency: int = Field(64, ge=1, description="reward calls under way at once")
    rm_retries: int = Field(3, ge=0, description="retries of a reward service that does not answer")
    custom_rm_path: str | None = Field(
        None, description="module.function(args, sample) that gives the reward; may be async"
    )
    group_rm: bool = Field(
        False, description="--custom-rm-path scores a whole group at once: module.function(args, samples)"
    )
    reward_key: str | None = Field(None, description="which entry of a mapping reward is trained on")
    custom_reward_post_process_path: str | None = Field(
        None,
        description="module.function(args, samples) that turns the rewards of a rollout into advantages, in the place "
        "of --advantage-estimator",
    )
    user_code_dir: str | None = Field(None, description="directory where the functions given by path are found")


class EvalConfig(BaseModel):
    """Evaluation"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eval_prompt_data: tuple[str, ...] = Field(
        (), description="pairs of NAME FILE: prompts to evaluate on; a file as for --prompt-data, with @[a:b]"
    )
    eval_interval: int | None = Field(
        None, ge=1, description="evaluate every so many steps too (default: only before training and at the end)"
    )
    skip_eval_before_train: bool = Field(False, description="no evaluation before the first step")
    n_samples_per_eval_prompt: int = Field(
        1, ge=1, description="responses to each prompt; pass@k is reported for k = 1, 2, 4, ... up to this"
    )
    eval_temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="sampling temperature (0: greedy)")
    eval_top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="nucleus sampling")
    eval_top_k: int = Field(-1, ge=-1, description="sample among the k likeliest tokens (-1: all)")
    eval_max_response_len: int | None = Field(
        None, ge=1, description="longest response, in tokens (default: --rollout-max-response-len)"
    )
    eval_max_prompt_len: int | None = Field(
        None,
        ge=1,
        description="longest prompt in tokens; longer ones are left out and counted (default: all that fit)",
    )
    eval_input_key: str = Field(
        INHERIT, min_length=1, description="field of the prompt in these files (inherit: that of --input-key)"
    )
    eval_label_key: str | None = Field(
        INHERIT,
        min_length=1,
        description="field of the label in these files (inherit: that of --label-key; none: no label)",
    )
    eval_pass_threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="reward from which a response passes (default: pass@k only where all rewards are 0 or 1)",
    )

    @property
    def datasets(self) -> list[tuple[str, str]]:
        """(name, file) of each set of prompts. ValueError when a name stands without a file."""
        return list(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=True))
