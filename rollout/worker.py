"""The rollout side of a run as one plain object: engine, prompts, rewards and collector behind blocking calls."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel.contract import Accelerator
from rollout.collectors.base import CollectorState
from rollout.collectors.factory import create_collector
from rollout.collectors.output import RolloutOutput
from rollout.collectors.sync import UserArgs
from rollout.config import EvalConfig, RewardConfig, RolloutConfig
from rollout.custom.contracts import FILTER, ROLLOUT
from rollout.custom.generate import CustomGenerate
from rollout.custom.training import load_conversion, load_post_process
from rollout.deploy.config import ServerChannel, SGLangConfig
from rollout.deploy.hosts import Spawner
from rollout.deploy.layout import Layout
from rollout.deploy.run_layout import run_layout
from rollout.engines.choice import choose_engine
from rollout.engines.factory import create_engine
from rollout.engines.protocol import JoinsTrainer
from rollout.evaluation import EvaluationSet, Evaluator, load_evaluation_sets
from rollout.event_loop import EventLoopThread
from rollout.group import GroupRunner
from rollout.limits import context_limits, evaluation_limits
from rollout.rewards import build_reward
from samples import DataSource
from samples.config import DataConfig
from samples.custom_source import CustomDataSource, open_custom_source
from samples.errors import InputError
from samples.signatures import load_user_function
from samples.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RolloutSettings:
    """Everything a rollout worker needs to know; plain data, so that it can be sent to another process."""

    rollout: RolloutConfig
    reward: RewardConfig
    evaluation: EvalConfig
    data: DataConfig
    model_dir: Path
    seed: int
    threads: int
    bf16: bool = False
    trust_remote_code: bool = False
    num_rollout: int = 1  # of the whole run: nothing is generated beyond its last step
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    num_gpus: int | None = None  # devices of all rollout engines; None: one engine's, or as many as are described
    num_gpus_per_engine: int = 1
    weight_channel: ServerChannel = "disk"  # to SGLang servers
    frees_memory: bool = False  # the engine gives memory back while others use the devices

    @property
    def layout(self) -> Layout:
        """Where the engines lie, on the one node of this worker."""
        return run_layout(self.sglang, num_gpus=self.num_gpus, num_gpus_per_engine=self.num_gpus_per_engine)


class RolloutWorker:
    """Prompts in, scored groups out. The engine decodes on a thread of its own; calls here block their caller only."""

    def __init__(
        self,
        settings: RolloutSettings,
        accelerator: Accelerator,
        *,
        load_weights: bool = False,
        spawner: Spawner | None = None,
    ) -> None:
        """``spawner`` starts servers elsewhere; None: here."""
        self._settings = settings
        self._loop = EventLoopThread("rollout-loop")
        torch.set_num_threads(settings.threads)
        tokenizer = load_tokenizer(settings.model_dir, trust_remote_code=settings.trust_remote_code)
        limits = context_limits(settings.model_dir, settings.rollout, settings.data)
        self._source = open_source(settings, tokenizer)
        self._engine = create_engine(
            settings.rollout,
            settings.model_dir,
            accelerator,
            dtype=torch.bfloat16 if settings.bf16 else torch.float32,
            max_context_len=limits.max_context_len,
            threads=settings.threads,
            load_weights=load_weights,
            seed=settings.seed,
            sglang=settings.sglang,
            layout=settings.layout,
            trust_remote_code=settings.trust_remote_code,
            weight_channel=settings.weight_channel,
            spawner=spawner,
            frees_memory=settings.frees_memory,
        )
        filtered = settings.rollout.rollout_top_p < 1 or settings.rollout.rollout_top_k > 0
        if filtered and not self._engine.capabilities.returns_kept_token_ids:
            raise InputError(
                "--rollout-top-p or --rollout-top-k: this engine does not tell which tokens were kept, so training "
                "would take the sampled distribution for another; leave them out, or use --rollout-engine torch"
            )
        self._args = args = UserArgs(settings.rollout, settings.reward)
        self._reward = build_reward(settings.reward, args)
        generate = load_generate(settings, tokenizer, args)
        self._collector = create_collector(
            settings.rollout,
            settings.reward,
            engine=self._engine,
            source=self._source,
            reward=self._reward,
            dynamic_filter=load_filter(settings),
            seed=settings.seed,
            max_context_len=limits.max_context_len,
            num_rollout=settings.num_rollout,
            generate=generate,
            tokenizer=tokenizer,
            args=args,
        )
        self._evaluator = Evaluator(
            settings.evaluation,
            settings.rollout,
            runner=GroupRunner(
                self._engine,
                self._reward,
                args,
                seed=settings.seed,
                max_context_len=limits.max_context_len,
                generate=generate,
            ),
            sets=open_evaluation_sets(settings, tokenizer),
            reward_key=settings.reward.reward_key,
        )

    def start(self) -> None:
        self._loop.run(self._engine.start())
        if choose_engine(self._settings.rollout)[0] == "sglang":
            from rollout.engines.sglang.opening import model_routers

            self._args.sglang_model_routers.update(model_routers(self._engine))

    def collect(self, rollout_id: int) -> RolloutOutput:
        output = self._loop.run(self._collector.collect(rollout_id))
        counts = self._loop.run(self._engine.health()).counts
        output.metrics.update({f"engine/{name}": float(count) for name, count in counts.items()})
        return output

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics of every set of ``--eval-prompt-data`` under the current weights; call it between rollouts."""
        return self._loop.run(self._evaluator.evaluate(rollout_id))

    def settle(self) -> None:
        """Return once new weights may come; what the collector has to finish first is finished."""
        self._loop.run(self._collector.settle())

    def begin_update(self, version: int) -> None:
        """Settle, and have the engine stand still until ``commit_update`` of the same version."""
        self.settle()
        self._loop.run(self._engine.begin_update(version))

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A bucket of whole tensors under Hugging Face names; their memory may be used anew afterwards."""
        self._loop.run(self._engine.update_weights(tensors))

    def commit_update(self, version: int) -> None:
        self._loop.run(self._engine.commit_update(version))
        self._loop.run(self._weights_updated(version))

    def held_version(self) -> int | None:
        return self._loop.run(self._engine.held_version())

    def keep_weights(self, names: frozenset[str]) -> None:
        self._loop.run(self._engine.keep_weights(names))

    def fail_update(self, reason: str) -> None:
        self._loop.run(self._engine.fail_update(reason))

    def differing_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return self._loop.run(self._engine.differing_weights(tensors))

    def open_server_group(self, address: str, word: str) -> None:
        """Have the servers take new weights from the trainer, which is found there, over a process group."""
        assert isinstance(self._engine, JoinsTrainer)
        self._loop.run(self._engine.join_trainer(address, word))

    def release_memory(self, tags: tuple[str, ...], timeout: float) -> None:
        """Settle, and have the engine give memory back (``rollout.engines.protocol.MEMORY_TAGS``)."""
        self.settle()
        self._loop.run(self._engine.release_memory(tags, timeout))

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        self._loop.run(self._engine.resume_memory(tags))

    def state(self) -> CollectorState:
        """The cursor of consumed prompts and the groups that are not trained on yet, as they are between two steps."""
        return self._loop.run(self._collector.state())

    def restore(self, state: CollectorState) -> None:
        """Go on from ``state``; before the first rollout."""
        self._loop.run(self._restore(state))

    def close(self) -> None:
        """Stop collector, engine and rewards within a bounded time; nothing of this worker runs afterwards."""
        self._loop.check_free()  # nothing of it could be stopped otherwise
        with ExitStack() as stack:  # from the last to the first, whatever fails
            stack.callback(self._loop.close)
            stack.callback(lambda: self._loop.run(self._engine.stop()))
            stack.callback(lambda: self._loop.run(self._reward.close()))
            stack.callback(lambda: self._loop.run(self._collector.close()))

    async def _weights_updated(self, version: int) -> None:
        self._collector.weights_updated(version)

    async def _restore(self, state: CollectorState) -> None:
        self._collector.restore(state)


def open_source(settings: RolloutSettings, tokenizer: Any) -> DataSource | CustomDataSource:
    """Where prompts come from: ``--data-source-path``, else ``--prompt-data``. Raises InputError for what cannot be."""
    sizes: dict[str, Any] = {
        "seed": settings.seed,
        "n_samples_per_prompt": settings.rollout.n_samples_per_prompt,
        "max_prompt_len": context_limits(settings.model_dir, settings.rollout, settings.data).max_prompt_len,
    }
    if settings.data.data_source_path is None:
        return DataSource(settings.data, tokenizer, **sizes)
    return open_custom_source(settings.data, tokenizer, **sizes, user_code_dir=settings.reward.user_code_dir)


def load_generate(settings: RolloutSettings, tokenizer: Any, args: UserArgs | None = None) -> CustomGenerate | None:
    """The function of ``--custom-generate-function-path``, if one is given; ``args`` is what it sees."""
    path = settings.rollout.custom_generate_function_path
    if path is None:
        return None
    args = args or UserArgs(settings.rollout, settings.reward)
    return CustomGenerate.load(path, args, tokenizer, settings.reward.user_code_dir)


def check_functions(settings: RolloutSettings, tokenizer: Any) -> None:
    """Load every function given by path. Raises InputError for one that is not there or cannot be called as it is."""
    load_filter(settings)
    load_generate(settings, tokenizer)
    load_post_process(settings.reward)
    load_conversion(settings.rollout, settings.reward)
    if settings.rollout.rollout_function_path is not None:
        load_user_function(settings.rollout.rollout_function_path, ROLLOUT, settings.reward.user_code_dir)


def open_evaluation_sets(settings: RolloutSettings, tokenizer: Any) -> list[EvaluationSet]:
    """The sets of prompts to evaluate on, checked; none is no error."""
    if not settings.evaluation.eval_prompt_data:
        return []
    limits = evaluation_limits(settings.model_dir, settings.rollout, settings.evaluation)
    return load_evaluation_sets(settings.evaluation, settings.data, tokenizer, max_prompt_len=limits.max_prompt_len)


def load_filter(settings: RolloutSettings) -> Any:
    """The dynamic-sampling filter, or None when every group is kept."""
    path = settings.rollout.dynamic_sampling_filter_path
    if path is None:
        return None
    return load_user_function(path, FILTER, settings.reward.user_code_dir).function
