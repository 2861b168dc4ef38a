"""The command line: names, values, precedence, and what is said about words that are no flags."""

from __future__ import annotations

import tomllib

import pytest

from samples.errors import InputError
from train.config import slime_flags
from train.config.cli import parse, parse_known, uses_builtin_example
from train.config.flags import flags, sections
from train.config.run import RunConfig


def refusal(*argv: str) -> str:
    with pytest.raises(InputError) as refused:
        parse(argv)
    return str(refused.value)


def test_no_flags_give_the_defaults_of_the_fields():
    assert parse([]) == RunConfig()


def test_a_flag_sets_the_field_of_its_section():
    config = parse(["--rollout-top-p", "0.9", "--lr=1e-5", "--bf16", "--no-rollout-shuffle", "--launcher", "inline"])
    assert config.rollout.rollout_top_p == 0.9
    assert config.optimizer.lr == 1e-5
    assert config.model.bf16
    assert not config.data.rollout_shuffle
    assert config.job.launcher == "inline"


def test_every_flag_can_be_given_its_default_and_changes_nothing():
    argv: list[str] = []
    for flag in flags().values():
        default = flag.default
        if flag.kind is bool:
            argv.append(
                f"{flag.option}=none" if default is None else flag.option if default else f"--no-{flag.option[2:]}"
            )
        else:
            argv += [flag.option, "none" if default in (None, ()) else str(default)]
    assert parse(argv) == RunConfig()


def test_later_sources_win_over_earlier_ones(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("seed = 2\nlr = 0.2\n")
    base = {"seed": 1, "lr": 0.1, "num_rollout": 7}
    config = parse(["--config", str(file), "--lr", "0.3"], base)
    assert (config.job.num_rollout, config.job.seed, config.optimizer.lr) == (7, 2, 0.3)


def test_a_base_value_yields_to_the_other_way_of_settling_the_same_thing():
    base = {"num_steps_per_rollout": 4, "micro_batch_size": 8}
    config = parse(["--global-batch-size", "64", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512"], base)
    assert config.batch.num_steps_per_rollout is None
    assert config.batch.micro_batch_size is None
    assert parse(["--no-use-dynamic-batch-size"], base).batch.micro_batch_size == 8


def test_a_flag_given_twice_takes_the_later_value():
    assert parse(["--seed", "1", "--seed", "2"]).job.seed == 2


def test_a_list_takes_several_values_and_repeating_it_appends():
    explicit = parse_known(["--prompt-data", "a", "b", "--prompt-data=c", "--rollout-stop-token-ids", "1", "-2"])
    assert explicit == {"prompt_data": ("a", "b", "c"), "rollout_stop_token_ids": (1, -2)}


def test_a_list_on_the_command_line_replaces_that_of_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('rollout_stop = ["x"]\n')
    assert parse(["--config", str(file), "--rollout-stop", "y"]).rollout.rollout_stop == ("y",)


def test_none_clears_an_optional_value_and_a_list():
    base = {"label_key": "answer", "rollout_stop": ("x",), "custom_rm_path": "m.f"}
    config = parse(["--label-key", "none", "--rollout-stop", "none"], base)
    assert config.data.label_key is None
    assert config.rollout.rollout_stop == ()


def test_a_value_may_begin_with_a_dash():
    assert parse(["--rollout-top-k", "-1"]).rollout.rollout_top_k == -1
    assert parse(["--rollout-stop=--"]).rollout.rollout_stop == ("--",)


def test_parse_known_tells_what_was_given_and_nothing_else():
    explicit = parse_known(["--seed", "3", "--label-key", "none", "--no-bf16"])
    assert explicit == {"seed": 3, "label_key": None, "bf16": False}


def test_the_builtin_example_runs_unless_a_model_or_prompts_are_named():
    assert uses_builtin_example(parse_known(["--seed", "1", "--hf-checkpoint", "none"]))
    assert not uses_builtin_example(parse_known(["--hf-checkpoint", "x"]))
    assert not uses_builtin_example(parse_known(["--prompt-data", "x"]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rollout-batchsize", "4"], "--rollout-batchsize: unknown flag; did you mean --rollout-batch-size?"),
        (["--rollout_batch_size", "4"], "did you mean --rollout-batch-size?"),
        (["--rollout-temp", "1"], "--rollout-temp: unknown flag"),  # no abbreviations, though it is a prefix
        (["--no-shuffle"], "did you mean --no-rollout-shuffle?"),
        (["--print-conf"], "did you mean --print-config?"),
        (["--qqqq"], "--qqqq: unknown flag; --help lists them all"),
        (["--no-lr"], "--no-lr: unknown flag"),
        (["stray"], "stray: not expected here"),
        (["--bf16", "true"], "--bf16: takes no value, got true; use --no-bf16"),
        (["--bf16=maybe"], "--bf16=maybe: must be true or false"),
        (["--lr"], "--lr: needs a value: a number > 0"),
        (["--lr", "1", "2"], "--lr: takes one value, got 1 2"),
        (["--prompt-data"], "--prompt-data: needs at least one value"),
        (["--config"], "--config: takes one file"),
        (["--config", "a", "--config", "b"], "given twice"),
        (["--print-config", "x"], "--print-config: takes no value"),
    ],
)
def test_a_command_line_that_cannot_be_read_says_why(argv, said):
    assert said in refusal(*argv)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rollout-temperature", "0"], "--rollout-temperature 0: must be a number > 0 (greedy"),
        (["--rollout-temperature", "-1"], "--rollout-temperature -1: must be a number > 0"),
        (["--rollout-temperature", "nan"], "--rollout-temperature nan: must be a number > 0"),
        (["--n-samples-per-prompt", "0"], "--n-samples-per-prompt 0: must be a whole number >= 1"),
        (["--rollout-top-p", "1.5"], "--rollout-top-p 1.5: must be a number > 0 and <= 1"),
        (["--lr", "fast"], "--lr fast: must be a number > 0"),
        (["--seed", "1.5"], "--seed 1.5: must be a whole number"),
        (["--eps-clip-high", "x"], "--eps-clip-high x: must be a number >= 0, or none"),
        (["--launcher", "slurm"], "--launcher slurm: must be ray or inline"),
        (["--rollout-mode", "async"], "--rollout-mode async: must be one of sync, one-step-off, fully-async (use"),
        (["--kl-loss-type", "low_var_kl"], "use k3"),
        (["--advantage-estimator", "gspo"], "this version has GRPO only"),
        (["--rollout-stop-token-ids", "1", "x"], "--rollout-stop-token-ids x: must be a list, each a whole number"),
        (["--input-key", ""], "--input-key '': must be text"),
    ],
)
def test_a_value_out_of_bounds_says_flag_value_and_bound(argv, said):
    assert said in refusal(*argv)


def test_several_problems_are_told_together_one_line_each():
    lines = refusal("--lr", "-1", "--seed", "x", "--lrr", "1").splitlines()
    assert lines[0] == "3 problems with the configuration:"
    assert [line.split()[0] for line in lines[1:]] == ["--lrr:", "--lr", "--seed"]


def test_print_config_prints_what_toml_reads_and_stops(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--seed", "5", "--print-config"], {"num_rollout": 9})
    assert stopped.value.code == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["job"]["seed"] == 5
    assert printed["job"]["num_rollout"] == 9


@pytest.mark.parametrize("reading", [parse, parse_known])
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_every_flag_with_its_section_and_stops(capsys, reading, word):
    with pytest.raises(SystemExit) as stopped:
        reading([word])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in flags().values():
        assert f"  {flag.option} " in text
    for model in sections().values():
        assert f"\n{model.__doc__}\n" in text
    assert "> 0 and <= 1; default: 1.0" in text


# slime's command line


def test_a_flag_of_slimes_that_we_do_not_have_says_so():
    for word in sorted(slime_flags.known_options() - set(slime_flags.ALIASES)):
        assert refusal(f"--{word}", "x").startswith(f"--{word}: slime's flag, not one of accelrl's: "), word


def test_the_slime_table_holds_no_flag_that_we_have():
    ours = {flag.option[2:] for flag in flags().values()}
    assert not ours & slime_flags.known_options()


def test_what_the_slime_table_offers_instead_exists():
    ours = {flag.option for flag in flags().values()} | {"--no-grpo-std-normalization", "--engine-*"}
    for word in slime_flags.known_options() - set(slime_flags.ALIASES):
        offered = [w.strip(",;:.()") for w in (slime_flags.reason(word) or "").split() if w.startswith("--")]
        assert set(offered) <= ours, (word, offered)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--use-opsm", "off-policy samples"),
        ("--eval-config", "evaluation"),
        ("--eval-min-new-tokens", "Evaluation"),
        ("--train-memory-margin-bytes", "take turns"),
        ("--use-mlflow", "tracker"),
        ("--wandb-tags", "Weights & Biases"),
        ("--rollout-external", "--rollout-external-engine-addrs"),
        ("--rollout-buffer-url", "does not start itself"),
        ("--sglang-mem-fraction-static", "--sglang-overrides"),
        ("--optimizer-cpu-offload", "optimizer"),
        ("--num-layers", "config.json"),
        ("--rollout-seed", "--seed"),
        ("--moe-router-topk", "mixture-of-experts"),
        ("--moe-router-bias-update-rate", "stays as the checkpoint has it"),
        ("--moe-router-enable-expert-bias", "stays as the checkpoint has it"),
    ],
)
def test_flags_for_what_later_versions_bring_are_refused_plainly(word, said):
    message = refusal(word)
    assert message.startswith(f"{word}: slime's flag")
    assert said in message


def test_aliases_of_slime_set_our_fields():
    explicit = parse_known(["--disable-grpo-std-normalization", "--calculate-per-token-loss"])
    assert explicit == {"grpo_std_normalization": False, "loss_aggregation": "token-mean"}
