"""What slime's flags are here: aliases that we take, and for the rest what to use instead or why there is none.

slime's command line is its own flags (``slime/utils/arguments.py``) plus Megatron-LM's and SGLang's. None of
theirs is swallowed: it is one of ours by the same name, or in ``ALIASES``, or an error with what ``reason`` returns.
"""

from __future__ import annotations

# Same meaning under another name: option -> (field, value that it sets).
ALIASES: dict[str, tuple[str, object]] = {
    "disable-grpo-std-normalization": ("grpo_std_normalization", False),
    "calculate-per-token-loss": ("loss_aggregation", "token-mean"),
    "use-stateless-adam": ("optimizer", "stateless-adam"),
}

_USE = {  # slime's option: what to give instead
    "balance-data": "leave it out: ranks and micro-batches are always balanced by tokens",
    "train-backend": "leave it out: training is Megatron-Core",
    "use-kl-loss": "--kl-loss-coef above 0 switches the KL loss on",
    "kl-coef": "--kl-loss-coef: the KL divergence is part of the loss, not of the reward",
    "use-unbiased-kl": "--kl-loss-type k3 (or k1, k2)",
    "rollout-seed": "--seed, which seeds model, prompts and sampling",
    "num-epoch": "--num-rollout; an epoch is prompts / --rollout-batch-size rollouts",
    "num-gpus-per-node": "--actor-num-gpus-per-node and --rollout-num-gpus",
    "distributed-backend": "--accelerator; its backend follows from it",
    "use-distributed-optimizer": "leave it out: the optimizer is always distributed over the data-parallel ranks",
    "use-rollout-routing-replay": "leave it out: no rollout engine here returns the experts that its router chose, so "
    "the trainer routes anew; --use-tis corrects for what that changes",
    "use-routing-replay": "leave it out: old and new policy are routed each by its own weights; --use-tis corrects for "
    "what that changes",
    "use-rollout-entropy": "leave it out: the entropy is always in the metrics",
    "custom-tis-function-path": "--tis-mode and --tis-level with --use-tis: masked and sequence-level corrections",
    "get-mismatch-metrics": "leave it out: train/train_rollout_logprob_abs_diff is always in the metrics",
    "disable-rewards-normalization": "--no-grpo-std-normalization: no division; the mean is always subtracted",
    "rollout-sample-filter-path": "--rollout-sample-hook-path, or --dynamic-sampling-filter-path for whole groups",
    "buffer-filter-path": "--dynamic-sampling-filter-path",
    "norm-epsilon": "leave it out: it is read from config.json in --hf-checkpoint",
    "megatron-to-hf-mode": "leave it out: Hugging Face weights go in and out directly",
    "model-name": "leave it out: the model family is read from config.json in --hf-checkpoint",
    "finetune": "leave it out: --hf-checkpoint always starts a new run",
    "wandb-mode": "the environment variable WANDB_MODE: online, offline or disabled",
    "wandb-key": "the environment variable WANDB_API_KEY or 'wandb login'; every user of a machine can see its flags",
    "wandb-host": "the environment variable WANDB_BASE_URL",
    "wandb-run-id": "the environment variables WANDB_RUN_ID and WANDB_RESUME",
    "wandb-dir": "leave it out: what wandb writes is in the run directory",
    "wandb-random-suffix": "--wandb-name",
    "disable-wandb-random-suffix": "leave it out: names get no suffix",
    "wandb-always-use-train-step": "leave it out: every metric is logged by training step",
    "tb-project-name": "leave it out: TensorBoard's files are in the run directory",
    "tb-experiment-name": "leave it out: TensorBoard's files are in the run directory",
    "no-save-optim": "leave it out: a checkpoint always holds the optimizer's state",
    "no-save-rng": "leave it out: a checkpoint always holds what randomness follows from",
    "no-load-optim": "--hf-checkpoint with the checkpoint's directory: a new run from its weights alone",
    "no-load-rng": "leave it out: a run that is resumed draws what it would have drawn",
    "ckpt-step": "--load with the directory of that checkpoint, such as checkpoints/step_000011",
    "ckpt-format": "leave it out: checkpoints are safetensors files and fit any layout",
    "start-rollout-id": "leave it out: --load goes on after the checkpoint's step",
    "ref-ckpt-step": "--ref-load with the directory of that checkpoint",
    "save-retain-interval": "--save-keep",
    "rollout-external": "--rollout-external-engine-addrs alone",
    "use-fault-tolerance": "leave it out: servers that die are always started again, --max-engine-restarts times",
    "rollout-health-check-first-wait": "leave it out: servers are watched from when they are ready on",
    "sglang-server-concurrency": "--engine-max-running-requests",
    "lr-warmup-fraction": "--lr-warmup-iters",
    "lr-warmup-samples": "--lr-warmup-iters",
    "lr-decay-samples": "--lr-decay-iters",
    "init-method-std": "leave it out: weights come from --hf-checkpoint",
    "tokenizer-model": "--hf-checkpoint, whose tokenizer is used",
    "tokenizer-type": "--hf-checkpoint, whose tokenizer is used",
    "data-path": "--prompt-data",
    "train-iters": "--num-rollout",
    "log-passrate": "metrics.jsonl; this version reports no pass rate",
    "use-cpu-initialization": "leave it out",
    "no-check-for-nan-in-loss-and-grad": "leave it out: a loss that is not finite always stops the run",
    "fp16": "--bf16",
    "use-pytorch-profiler": "--profile",
    "deterministic-mode": "--deterministic",
    "profile-target": "--profile-what",
    "profile-step-start": "--profile-steps with the first and the last step, such as 3-5",
    "profile-step-end": "--profile-steps with the first and the last step, such as 3-5",
    "profile-ranks": "--profile: every rank leaves a trace",
    "record-memory-history": "--profile, which keeps it on devices that have one",
    "memory-recorder": "--profile, which keeps the history of allocations on devices that have one",
    "memory-snapshot-dir": "--profile, whose files are in the run directory's profile/",
    "memory-snapshot-num-steps": "--profile-steps",
}

_LATER = {  # what this version does not do yet: its options
    "evaluation written by the user, or set up in a file of its own": """
        eval-config eval-function-path custom-eval-rollout-log-function-path
    """,
    "such settings of devices that training and rollout take turns on": """
        train-memory-margin-bytes disable-weights-backuper
    """,
    "such tracker or statistics": """
        use-mlflow log-multi-turn log-reward-category log-correct-samples
    """,
    "rollout engines that it does not start itself": """
        rollout-buffer-url rollout-buffer fetch-trajectory-retry-times
        min-batch-collection-ratio
    """,
    "such settings of rollout that runs ahead of training": """
        update-weights-interval keep-old-actor
    """,
    "such corrections for off-policy samples": """
        use-opsm opsm-delta eps-clip-c
    """,
    "records of what training computes, or of parts of a rollout": """
        load-debug-rollout-data-subsample save-debug-train-data dump-details
    """,
    "mixture-of-experts settings beside config.json": """
        num-experts expert-tensor-parallel-size
    """,
    "a critic": """
        value-clip gamma lambd num-critic-only-steps normalize-advantages
    """,
    "other losses than GRPO's": """
        loss-type custom-loss-function-path custom-pg-loss-reducer-function-path
        disable-compute-advantages-and-returns loss-mask-type
    """,
    "such function of the user's around a rollout": """
        custom-rollout-log-function-path rollout-data-postprocess-path disable-rollout-global-dataset
        rollout-all-samples-process-path custom-config-path
    """,
    "images and tools in prompts": """
        multimodal-keys tool-key apply-chat-template-kwargs
    """,
    "a choice of what is trained": """
        only-train-params-name-list freeze-params-name-list custom-model-provider-path custom-megatron-init-path
        custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path
    """,
    "state of the optimizer but in the trainer, in fp32": """
        optimizer-cpu-offload use-precision-aware-optimizer overlap-cpu-optimizer-d2h-h2d reset-optimizer-states
    """,
    "reference model that changes": """
        ref-update-interval
    """,
    "a choice of attention kernels": """
        attention-backend use-flash-attn transformer-impl true-on-policy-mode attention-softmax-in-fp32
        accumulate-allreduce-grads-in-fp32
    """,
    "chunking of the loss that saves memory": """
        recompute-loss-function log-probs-chunk-size log-probs-max-tokens-per-gpu
    """,
    "overlap of communication with computation": """
        overlap-grad-reduce overlap-param-gather tp-comm-overlap use-distributed-post
    """,
    "batches that change their size": """
        use-dynamic-global-batch-size disable-rollout-trim-samples data-pad-size-multiplier rollout-task-type
    """,
    "settings of worker processes": """
        train-env-vars http-proxy distributed-timeout-minutes rollout-skip-special-tokens
    """,
    "virtual pipeline stages": """
        num-layers-per-virtual-pipeline-stage decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
    """,
    "multi-token prediction": """
        enable-mtp-training
    """,
    "low-precision training": """
        fp8-format fp8-recipe fp8 fp8-param-gather
    """,
}

_MODEL_SHAPE = """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels max-position-embeddings
    seq-length vocab-size padded-vocab-size make-vocab-size-divisible-by position-embedding-type rotary-base
    rotary-percent use-rotary-position-embeddings rotary-scaling-factor use-rope-scaling no-rope-fusion normalization
    norm-eps swiglu disable-bias-linear add-qkv-bias qk-layernorm group-query-attention hidden-dropout
    untie-embeddings-and-output-weights attention-dropout apply-layernorm-1p multi-latent-attention spec
"""  # Megatron-LM's description of the model

_METRICS = "metrics.jsonl in the run directory has every metric"

_FAMILIES = (  # beginnings of names, the longer ones first
    ("sglang-router-", "the router's settings are the --router-* flags that --help lists"),
    ("sglang-", "use --sglang-overrides name=value, which takes any argument of SGLang's servers"),
    ("slime-router-", "the router is SGLang's own; its settings are the --router-* flags"),
    ("use-slime-router", "the router is SGLang's own"),
    ("router-", "the router's settings are those --router-* flags that --help lists"),
    ("wandb-", "Weights & Biases reads its own environment variables (WANDB_...)"),
    ("mlflow-", f"this version has no MLflow tracker; {_METRICS}"),
    ("eval-", "evaluations have other settings here, which --help lists under Evaluation"),
    ("critic-", "this version has no critic"),
    ("opd-", "this version has no distillation"),
    ("use-opd", "this version has no distillation"),
    ("moe-router-bias", "a router's bias stays as the checkpoint has it; the router learns by the policy gradient"),
    (
        "moe-router-enable-expert-bias",
        "config.json says if routers have a bias, which stays as the checkpoint has it",
    ),
    ("moe-", "a mixture-of-experts model is run as its config.json says, without an auxiliary loss"),
    ("mtp-", "this version has no multi-token prediction"),
    ("fsdp-", "training is Megatron-Core"),
    ("ci-", "slime's own tests use it"),
)

_REASONS: dict[str, str] = {
    **{option: f"use {instead}" if instead.startswith("-") else instead for option, instead in _USE.items()},
    **{option: f"this version has no {what}" for what, options in _LATER.items() for option in options.split()},
    **dict.fromkeys(
        _MODEL_SHAPE.split(), "leave it out: the model's shape is read from config.json in --hf-checkpoint"
    ),
}


def known_options() -> frozenset[str]:
    """Every option of the tables, without its dashes; the families are not spelt out."""
    return frozenset(_REASONS) | frozenset(ALIASES)


def reason(option: str) -> str | None:
    """What to say about an option of slime's (no dashes before it) that is not one of ours; None for any other word."""
    for name in (option, option.removeprefix("no-")):
        if name in _REASONS:
            return _REASONS[name]
        for beginning, why in _FAMILIES:
            if name.startswith(beginning):
                return why
    return None
