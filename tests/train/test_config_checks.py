"""Settings that contradict each other or the disk are refused before anything starts, with a value that works."""

from __future__ import annotations

import json
import re

import pytest

from samples.errors import InputError
from train.config.checks import validate
from train.config.checks.batch import nearest_divisor
from train.config.cli import parse
from train.config.run import RunConfig
from train.config.settings import build
from train.example import EXAMPLE_SETTINGS


def problems(**values: object) -> str:
    """What is said about a configuration with these values; empty when it is accepted."""
    try:
        validate(build(values))
    except InputError as error:
        return str(error)
    return ""


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return directory


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "label": "2"}\n')
    return file


def test_the_defaults_are_accepted():
    validate(RunConfig())


def test_a_model_and_prompts_that_exist_are_accepted(model_dir, prompts):
    assert problems(hf_checkpoint=str(model_dir), prompt_data=(str(prompts), f"{prompts}@[0:1]")) == ""


BATCH = {"rollout_batch_size": 6, "n_samples_per_prompt": 4}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_steps_per_rollout": 5}, "--num-steps-per-rollout 5 does not divide --rollout-batch-size 6 x "),
        ({"num_steps_per_rollout": 5}, "x --n-samples-per-prompt 4 = 24 samples; 4 does"),
        ({"num_steps_per_rollout": 100}, "; 24 does"),
        ({"global_batch_size": 7}, "--global-batch-size 7 does not divide"),
        ({"global_batch_size": 7}, "; 6 does"),
        ({"global_batch_size": 25}, "; 24 does"),
        ({"num_steps_per_rollout": 3, "global_batch_size": 4}, "3 x --global-batch-size 4 is not"),
        ({"num_steps_per_rollout": 3, "global_batch_size": 4}, "leave --global-batch-size out (it follows: 8)"),
        ({"num_steps_per_rollout": 5, "global_batch_size": 4}, "4 without --global-batch-size works"),
        ({"n_samples_per_prompt": 1}, "--n-samples-per-prompt 1: GRPO compares"),
        ({"global_batch_size": 2, "actor_num_gpus_per_node": 4}, "leave some of 4 data-parallel ranks"),
        ({"max_tokens_per_gpu": 900}, "--max-tokens-per-gpu 900 needs --use-dynamic-batch-size"),
        ({"use_dynamic_batch_size": True}, "needs --max-tokens-per-gpu, at least 257 here"),
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 256}, "is less than one sample can have, 257"),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 300, "rollout_max_prompt_len": 64},
            "320 tokens (--rollout-max-prompt-len 64 and --rollout-max-response-len 256); use at least 320",
        ),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 300, "micro_batch_size": 2},
            "two ways to choose a micro-batch",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_divided_is_refused_with_a_value_that_works(values, said):
    assert said in problems(**(BATCH | values))


@pytest.mark.parametrize(
    "values",
    [
        {"num_steps_per_rollout": 4},
        {"global_batch_size": 8},
        {"num_steps_per_rollout": 3, "global_batch_size": 8},
        {"global_batch_size": 4, "actor_num_gpus_per_node": 4},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 257},
    ],
)
def test_a_batch_that_divides_is_accepted(values):
    assert problems(**(BATCH | values)) == ""


@pytest.mark.parametrize(
    ("number", "wanted", "divisor"), [(24, 5, 4), (24, 7, 6), (24, 100, 24), (13, 5, 1), (1, 9, 1), (36, 6, 6)]
)
def test_the_nearest_divisor_is_a_divisor_and_near(number, wanted, divisor):
    assert nearest_divisor(number, wanted) == divisor


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size 2: this version"),
        ({"expert_model_parallel_size": 4, "actor_num_gpus_per_node": 2}, "share the experts between 4"),
        (
            {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
            "in each of 2 stages (--pipeline-model-parallel-size); use a multiple of 4",
        ),
        ({"pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 3}, "whole replicas of 2"),
        ({"launcher": "inline", "pipeline_model_parallel_size": 2}, "use --launcher ray"),
        ({"sequence_parallel": True}, "--sequence-parallel needs --tensor-model-parallel-size of at least 2"),
        ({"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 3}, "3 devices do not hold whole replicas of 2"),
        ({"launcher": "inline", "actor_num_gpus_per_node": 2}, "but 2 are asked for; use --launcher ray"),
        ({"launcher": "inline", "tensor_model_parallel_size": 2}, "use --launcher ray"),
        ({"launcher": "inline", "ray_address": "auto"}, "--ray-address auto needs --launcher ray"),
        ({"rollout_num_gpus_per_engine": 2}, "--rollout-num-gpus-per-engine 2: the embedded engine runs on one device"),
        ({"rollout_num_gpus": 2}, "--rollout-num-gpus 2: there is one embedded engine"),
    ],
)  # fmt: skip
def test_devices_that_cannot_be_divided_are_refused(values, said):
    assert said in problems(**values)


def test_tensor_and_data_parallel_ranks_are_accepted():
    values = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 4, "sequence_parallel": True}
    assert problems(**values) == ""
    config = build(values)
    assert (config.actor_world_size, config.model_replica_size, config.data_parallel_size) == (4, 2, 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"over_sampling_batch_size": 31}, "--over-sampling-batch-size 31 is less than --rollout-batch-size 32"),
        ({"over_sampling_batch_size": 48}, "nothing drops groups: 16 generated groups of every step would"),
        ({"rollout_min_response_len": 300}, "300 is more than --rollout-max-response-len 256"),
        ({"rollout_top_k": 0}, "--rollout-top-k 0"),
        ({"rollout_top_k": 1}, "--rollout-top-k 1: is greedy"),
        ({"rollout_max_context_len": 256}, "in --rollout-max-context-len 256; use at most 255"),
        (
            {"rollout_max_context_len": 300, "rollout_max_prompt_len": 50},
            "use at most 44 for the prompt",
        ),
        ({"engine_max_total_tokens": 256}, "--engine-max-total-tokens 256 cannot hold one request, which can have 257"),
        ({"rm_type": "exactmatch"}, "did you mean exact_match?"),
        ({"rm_type": "reasoning_gym:"}, "--rm-type 'reasoning_gym:' is not known"),
        ({"rm_type": "math:algebra"}, "--rm-type 'math:algebra' is not known"),
        ({"rm_type": "remote_rm"}, "--rm-type remote_rm needs the address of the service: --rm-url"),
        ({"rm_type": "remote_rm", "rm_url": "localhost:8000"}, "--rm-url 'localhost:8000' is not an address"),
        ({"rm_type": "remote_rm", "rm_url": "http://host:port/"}, "is not an address"),
        ({"rm_url": "http://host:1/"}, "--rm-url http://host:1/ is not used by --rm-type exact_match"),
        ({"rm_type": "math", "label_key": None}, "--label-key none: --rm-type math compares with a label"),
        (
            {"eval_prompt_data": ("test", "x.jsonl"), "eval_label_key": None},
            "--eval-label-key none: --rm-type exact_match compares with a label",
        ),
    ],
)  # fmt: skip
def test_sampling_and_rewards_that_contradict_themselves_are_refused(values, said):
    assert said in problems(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"rm_type": "reasoning_gym:chain_sum"},
        {"rm_type": "reasoning_gym", "label_key": None},
        {"rm_type": "remote_rm", "rm_url": "http://[::1]:8000/score"},
        {"custom_rm_path": "mine.score", "rm_url": "http://host:1/", "label_key": None},
        {"over_sampling_batch_size": 48, "dynamic_sampling_filter_path": "mine.keep"},
        {"over_sampling_batch_size": 48, "rollout_sample_hook_path": ("mine.hook",)},
        {"over_sampling_batch_size": 32, "rollout_top_k": 2, "rollout_min_response_len": 256},
    ],
)
def test_sampling_and_rewards_that_fit_are_accepted(values):
    assert problems(**values) == ""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": 1e-4, "min_lr": 1e-3}, "--min-lr 0.001 is more than --lr 0.0001"),
        ({"lr_warmup_iters": 9, "lr_decay_iters": 5}, "--lr-warmup-iters 9 leaves nothing of --lr-decay-iters 5"),
        ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, "to decay in; use at most 4"),
    ],
)
def test_learning_rates_that_contradict_themselves_are_refused(values, said):
    assert said in problems(**values)


def test_settings_of_a_long_run_may_be_tried_on_a_few_rollouts():
    assert problems(lr_warmup_iters=100, lr_decay_style="linear", num_rollout=2) == ""


def test_a_reference_model_is_for_the_kl_loss(model_dir):
    assert "--ref-load" in problems(ref_load=str(model_dir))
    assert problems(ref_load=str(model_dir), kl_loss_coef=0.1) == ""
    assert "--ref-load nowhere: no such directory" in problems(ref_load="nowhere", kl_loss_coef=0.1)


def test_a_model_needs_prompts_and_prompts_need_a_model(model_dir, prompts):
    assert "needs prompts: give --prompt-data" in problems(hf_checkpoint=str(model_dir))
    assert "needs a model: give --hf-checkpoint" in problems(prompt_data=(str(prompts),))


def test_what_is_no_model_directory_is_refused(tmp_path, model_dir, prompts):
    def said(path: object) -> str:
        return problems(hf_checkpoint=str(path), prompt_data=(str(prompts),))

    assert f"--hf-checkpoint {prompts}: is no directory" in said(prompts)
    assert "no such directory in " in said("some/where/else")
    assert "hf download Qwen/Qwen3-0.6B --local-dir DIR" in said("Qwen/Qwen3-0.6B")
    assert "has no config.json" in said(tmp_path)
    (model_dir / "config.json").write_text("{")
    assert "config.json cannot be read" in said(model_dir)
    (model_dir / "config.json").write_text("{}")
    assert "config.json names no model_type" in said(model_dir)


def test_prompt_files_that_are_not_there_are_each_named(tmp_path, model_dir):
    said = problems(hf_checkpoint=str(model_dir), prompt_data=("a.jsonl@[:9]", str(tmp_path), "b.jsonl@[x:]"))
    assert "--prompt-data a.jsonl@[:9]: no such file in " in said
    assert f"--prompt-data {tmp_path}: is no file" in said
    assert "--prompt-data 'b.jsonl@[x:]': expected FILE@[a:b]" in said


def test_outputs_that_are_in_the_way_are_refused(model_dir, prompts):
    assert f"--output-dir {prompts}: is a file" in problems(output_dir=str(prompts))
    assert f"--save-hf {prompts}: is a file" in problems(save_hf=str(prompts))
    given = {"hf_checkpoint": str(model_dir), "prompt_data": (str(prompts),)}
    assert "would write over --hf-checkpoint" in problems(**given, save_hf=f"{model_dir}/../model")
    assert f"--save-hf {model_dir}: is not empty" in problems(save_hf=str(model_dir))


def test_a_folder_of_user_code_must_be_there():
    assert "--user-code-dir nowhere: no such directory" in problems(user_code_dir="nowhere")


def test_the_command_line_is_checked_as_a_whole_in_one_message():
    with pytest.raises(InputError) as refused:
        parse(["--global-batch-size", "7", "--min-lr", "1", "--hf-checkpoint", "nowhere"])
    lines = str(refused.value).splitlines()
    assert lines[0] == "4 problems with the configuration:"
    assert re.findall(r"--[\w-]+", " ".join(line.split()[0] for line in lines[1:])) == [
        "--hf-checkpoint", "--hf-checkpoint", "--global-batch-size", "--min-lr"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_rollout_logprobs": True, "rollout_top_p": 0.9}, "--use-rollout-logprobs with --rollout-top-p 0.9"),
        ({"use_rollout_logprobs": True, "rollout_top_k": 5}, "--use-rollout-logprobs with --rollout-top-k 5"),
        ({"rollout_stop": ("end", "")}, "--rollout-stop '': an empty string is found in every response"),
        ({"rollout_stop_token_ids": (1, -2)}, "--rollout-stop-token-ids -2: is not a token id"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_before_it_starts(values, said):
    assert said in problems(**values)


WITHOUT_EFFECT = [
    ({"reward_key": "score"}, "--reward-key score: --rm-type exact_match gives a number"),
    ({"rm_retries": 5}, "--rm-retries 5: --rm-type exact_match calls no service"),
    ({"min_lr": 1e-7}, "--min-lr 1e-07: --lr-decay-style constant never decays"),
    ({"lr_decay_iters": 9}, "--lr-decay-iters 9: --lr-decay-style constant never decays"),
    ({"kl_loss_type": "k1"}, "--kl-loss-type k1: there is no KL loss"),
    ({"on_sampling_exhausted": "shrink"}, "--on-sampling-exhausted shrink: nothing drops groups"),
    ({"max_sampling_rounds": 3}, "--max-sampling-rounds 3: nothing drops groups"),
    ({"rollout_sample_hook_on_error": "drop"}, "--rollout-sample-hook-on-error drop: there is no sample hook"),
    ({"wandb_project": "mine"}, "--wandb-project mine: nothing is logged to Weights & Biases"),
    ({"wandb_name": "first"}, "--wandb-name first: nothing is logged"),
    ({"reload_process_groups": True}, "--reload-process-groups: one trainer device has no collectives"),
    ({"reload_process_groups": True, "tensor_model_parallel_size": 2, "debug_rollout_only": True}, "does not both"),
    ({"recompute_num_layers": 2}, "--recompute-num-layers 2: that is a choice of --recompute-granularity full"),
    ({"recompute_granularity": "selective", "recompute_method": "block"}, "--recompute-method block: that is a choice"),
    ({"recompute_modules": ("mlp",)}, "that is a choice of --recompute-granularity selective"),
    ({"run_name": "mine", "output_dir": "there"}, "--run-name mine: names the default output directory"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "said"), WITHOUT_EFFECT)
def test_a_value_that_nothing_would_come_of_is_refused(values, said):
    assert said in problems(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("skip_eval_before_train", True), ("eval_temperature", 0.5), ("eval_top_k", 5), ("eval_pass_threshold", 0.5)],
)
def test_settings_of_an_evaluation_without_prompts_are_refused(model_dir, prompts, name, value):
    given = {"hf_checkpoint": str(model_dir), "prompt_data": (str(prompts),), name: value}
    assert f"--{name.replace('_', '-')}" in problems(**given)
    assert problems(**given, eval_prompt_data=("test", str(prompts))) == ""
    assert problems(**{name: value}) == ""  # the built-in example brings prompts


@pytest.mark.parametrize(
    "values",
    [
        {"custom_rm_path": "mine.score", "reward_key": "score", "rm_retries": 0},
        {"rm_type": "remote_rm", "rm_url": "http://host:1/", "reward_key": "score", "rm_retries": 0},
        {"lr_decay_style": "cosine", "min_lr": 1e-7, "lr_decay_iters": 9},
        {"kl_loss_coef": 0.1, "kl_loss_type": "k1"},
        {"dynamic_sampling_filter_path": "a.b", "on_sampling_exhausted": "shrink", "max_sampling_rounds": 3},
        {"rollout_sample_hook_path": ("a.b",), "rollout_sample_hook_on_error": "drop", "max_sampling_rounds": 3},
        {"use_wandb": True, "wandb_project": "mine", "wandb_name": "first"},
        {"run_name": "mine"},
        {"reload_process_groups": True, "tensor_model_parallel_size": 2},
        {"lr_warmup_iters": 5, "num_rollout": 2},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
        {"qkv_format": "thd"},
    ],
)
def test_a_value_that_has_an_effect_is_accepted(values):
    assert problems(**values) == ""


def test_a_value_whose_purpose_the_command_line_takes_away_is_no_mistake(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[tracking]\nuse_wandb = true\nwandb_project = "mine"\n[output]\nrun_name = "mine"\n'
        '[optimizer]\nlr_decay_style = "linear"\nmin_lr = 1e-9\n'
    )
    config = parse(
        ["--config", str(file), "--no-use-wandb", "--output-dir", str(tmp_path / "x"), "--lr-decay-style", "constant"]
    )
    assert config.tracking.wandb_project == "mine"
    with pytest.raises(InputError, match="--wandb-group g: nothing is logged"):
        parse(["--config", str(file), "--no-use-wandb", "--wandb-group", "g"])
    file.write_text('[tracking]\nwandb_project = "mine"\n')
    with pytest.raises(InputError, match="--wandb-project mine: nothing is logged"):
        parse(["--config", str(file)])


def test_the_settings_of_the_builtin_example_yield_to_what_is_given():
    assert parse(["--dynamic-sampling-filter-path", "none"], EXAMPLE_SETTINGS).rollout.max_sampling_rounds == 3
    parse(["--dynamic-sampling-filter-path", "none", "--lr-decay-style", "constant"], EXAMPLE_SETTINGS)
