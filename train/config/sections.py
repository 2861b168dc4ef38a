"""The training side's settings, by concern. Data, rollout and reward settings live with their packages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of the sections: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class JobConfig(Section):
    """Job"""

    accelerator: str = Field("auto", description="cpu, cuda, musa, a registered vendor's name, or auto")
    emulate: bool = Field(False, description="use the accelerator's emulation in host memory, where it has one")
    launcher: Literal["ray", "inline"] = Field(
        "ray", description="ray: workers on this machine or a cluster; inline: one process"
    )
    ray_address: str | None = Field(
        None, description="join this Ray cluster ('auto' or host:port) instead of starting one here"
    )
    actor_num_nodes: int = Field(1, ge=1, description="nodes that train")
    actor_num_gpus_per_node: int | None = Field(
        None,
        ge=1,
        description="devices per node that train (default: one replica of tensor x pipeline x context parallel)",
    )
    rollout_num_gpus: int | None = Field(
        None,
        ge=0,
        description="devices that generate (default: one, or none of its own where devices can be shared, as on cpu)",
    )
    rollout_num_gpus_per_engine: int = Field(1, ge=1, description="devices of one rollout engine")
    trainer_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each trainer process (default: a share of the cores where devices are cores, or 1)",
    )
    rollout_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the rollout process (default: all cores where devices are cores, else 1)",
    )
    release_train: bool = Field(
        False,
        description="end the trainer's processes while the rollout generates, and make them anew from their state "
        "(--launcher ray)",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="seed of model, prompts and sampling")
    deterministic: bool = Field(
        False, description="kernels that give the same bits every time, on devices that have them; slower there"
    )
    num_rollout: int = Field(150, ge=1, description="training steps, each with a rollout before it")


class ModelConfig(Section):
    """Model"""

    hf_checkpoint: str | None = Field(None, description="Hugging Face model directory (default: the built-in example)")
    ref_load: str | None = Field(
        None, description="Hugging Face directory of the reference model (default: the initial weights)"
    )
    bf16: bool = Field(
        False,
        description="train and generate in bfloat16 (master weights and gradients stay fp32); without it all is "
        "float32, whatever the checkpoint's dtype",
    )
    trust_remote_code: bool = Field(False, description="run Python code that a checkpoint brings along")


class ParallelConfig(Section):
    """Parallelism"""

    tensor_model_parallel_size: int = Field(1, ge=1, description="devices that share each layer's matrices")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="stages that share the layers")
    context_parallel_size: int = Field(1, ge=1, description="devices that share each sequence")
    expert_model_parallel_size: int = Field(1, ge=1, description="devices that share the experts")
    sequence_parallel: bool = Field(False, description="shard activations between tensor-parallel matrices")
    reload_process_groups: bool = Field(
        False,
        description="give back what the collectives between trainer devices hold while the rollout generates, and "
        "rebuild it before training",
    )


class AlgorithmConfig(Section):
    """Algorithm"""

    advantage_estimator: Literal["grpo"] = Field("grpo", description="how rewards become advantages")
    grpo_std_normalization: bool = Field(
        True, description="divide a group's advantages by its standard deviation (off: mean only)"
    )
    eps_clip: float = Field(
        0.2, ge=0, lt=1, allow_inf_nan=False, description="lower clip of the importance ratio, 1 - this"
    )
    eps_clip_high: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="upper clip of the importance ratio, 1 + this (default: --eps-clip)",
    )
    kl_loss_coef: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="weight of the KL divergence to the reference model"
    )
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of that divergence (Schulman 2020)")
    entropy_coef: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of the entropy bonus")
    loss_aggregation: Literal["token-mean", "sequence-mean"] = Field(
        "token-mean", description="mean over all tokens of the batch, or over sequences of their token means"
    )
    use_rollout_logprobs: bool | None = Field(
        None,
        description="take the rollout's log-probabilities as the old policy's (default: on for engine torch in fp32, "
        "and where older weights sample: --rollout-mode, --partial-rollout, --keep-surplus-groups)",
    )
    use_tis: bool = Field(
        False,
        description="weight each token's loss by exp(old - rollout) of its log-probabilities, bounded: a correction "
        "for sampling from another distribution than the trainer's (truncated importance sampling)",
    )
    tis_clip: float = Field(2.0, gt=0, allow_inf_nan=False, description="upper bound of that weight")
    tis_clip_low: float = Field(0.0, ge=0, allow_inf_nan=False, description="lower bound of that weight")
    tis_mode: Literal["clip", "mask"] = Field(
        "clip", description="weights outside the bounds are put on the bound, or are 0"
    )
    tis_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="a weight for each token, or one for all of a response: of the sum of its log-ratios, or of their "
        "mean",
    )


class OptimizerSection(Section):
    """Optimizer"""

    optimizer: Literal["adam", "stateless-adam"] = Field(
        "adam",
        description="adam: AdamW with fp32 moments; stateless-adam: AdamW made anew before every step, which keeps and "
        "saves no moments (--use-stateless-adam)",
    )
    lr: float = Field(1e-6, gt=0, allow_inf_nan=False, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, allow_inf_nan=False, description="learning rate at the end of the decay")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="shape of the decay")
    lr_decay_iters: int | None = Field(None, ge=1, description="rollouts over which it decays (default: --num-rollout)")
    lr_warmup_iters: int = Field(0, ge=0, description="rollouts over which the learning rate rises from 0")
    adam_beta1: float = Field(0.9, ge=0, lt=1, allow_inf_nan=False, description="decay of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, allow_inf_nan=False, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the second moment's root")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="decoupled weight decay")
    clip_grad: float = Field(1.0, ge=0, allow_inf_nan=False, description="largest gradient norm (0: no clipping)")


class BatchConfig(Section):
    """Training batch"""

    num_steps_per_rollout: int | None = Field(
        None, ge=1, description="optimizer steps on one rollout's samples (default: 1)"
    )
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="samples in one optimizer step (default: the rollout's samples / --num-steps-per-rollout)",
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="samples in one forward and backward pass (default: all that a rank has in a step, up to 128)",
    )
    use_dynamic_batch_size: bool = Field(False, description="fill micro-batches by tokens instead of samples")
    max_tokens_per_gpu: int | None = Field(
        None, ge=1, description="tokens in one micro-batch, padding included, with --use-dynamic-batch-size"
    )
    qkv_format: Literal["bshd", "thd"] = Field(
        "bshd",
        description="bshd: pad a micro-batch's sequences to its longest; thd: pack them one after the other, so that "
        "no padding is computed (pays off where lengths differ much)",
    )


class OutputConfig(Section):
    """Output"""

    output_dir: str | None = Field(None, description="where the run writes (default: runs/<time>-<name>)")
    run_name: str | None = Field(None, description="name in the default output directory")
    save_hf: str | None = Field(
        None,
        description="write the trained model there as a Hugging Face directory at the end, in the dtype that it was "
        "trained in: bfloat16 with --bf16, else float32",
    )
    progress: Literal["auto", "live", "plain", "off"] = Field(
        "auto", description="how progress is shown (auto: live in a terminal)"
    )


class DebugConfig(Section):
    """Recording and replay"""

    save_debug_rollout_data: str | None = Field(
        None, description="write what each rollout hands to training there, a file a rollout (not while replaying)"
    )
    load_debug_rollout_data: str | None = Field(
        None, description="train on the rollouts recorded there instead of generating any"
    )
    debug_rollout_only: bool = Field(False, description="generate and score without training: weights stay as they are")
    debug_train_only: bool = Field(
        False, description="train without generating; implied by --load-debug-rollout-data, which it needs"
    )

    @property
    def replays(self) -> bool:
        """Whether rollouts come from a recording."""
        return self.load_debug_rollout_data is not None
