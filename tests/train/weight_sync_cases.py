"""What the tests of weight channels share: a tiny model with a tokenizer, an engine, and processes for both ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from accel import select_accelerator
from accel.contract import Accelerator
from rollout.engines.protocol import GenerateRequest, SamplingParams
from rollout.engines.torch_engine import TorchEngine
from rollout.event_loop import EventLoopThread
from tests.train.trainer_cases import VOCABULARY, make_batch, make_trainer, run_config, write_model
from train.weight_sync.plan import UpdatePlan
from train.weight_sync.receiving import ReceivingEnd
from train.weight_sync.sending import SendingEnd

PROMPT = (1, 2, 3, 4)
LENGTH = 12


def selected_accelerator() -> Accelerator:
    """The CPU, or what the environment names."""
    return select_accelerator(os.environ.get("ACCELRL_ACCELERATOR", "cpu"))


def write_served_model(directory: Path, seed: int = 0, *, mixture: bool = False) -> Path:
    """An untied Qwen3 of random weights, with or without experts, whose token ``i`` above 0 is ``chr(0x20 + i)``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_model(directory, seed=seed, mixture=mixture)
    vocabulary = {"<eos>": 0} | {chr(0x20 + index): index for index in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


def hf_greedy(directory: Path) -> list[int]:
    """What transformers answers ``PROMPT`` with."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([PROMPT])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    return output[0, len(PROMPT) :].tolist()


class BlockingEngine:
    """The embedded engine as a rollout worker has it: behind blocking calls."""

    def __init__(self, model_dir: Path, *, load_weights: bool = False) -> None:
        self._loop = EventLoopThread("test-rollout")
        self._engine = TorchEngine(
            model_dir, selected_accelerator(), dtype=torch.float32, max_running_requests=4, max_context_len=64,
            load_weights=load_weights, threads=1,
        )  # fmt: skip
        self._loop.run(self._engine.start())
        self._requests = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._loop.run(getattr(self._engine, name)(*arguments))

    def greedy(self) -> tuple[list[int], int]:
        """The answer to ``PROMPT``, and the version that gave it."""
        self._requests += 1
        params = SamplingParams(LENGTH, temperature=0.0, ignore_eos=True)
        result = self._loop.run(self._engine.generate(GenerateRequest(f"r{self._requests}", PROMPT, params, 0, 0, 0)))
        return result.output_ids, result.weight_version

    def state(self) -> str:
        return self._loop.run(self._engine.health()).weight_state

    def close(self) -> None:
        self._loop.run(self._engine.stop())
        self._loop.close()


def plan(
    channel: str,
    directory: Path,
    *,
    bucket_bytes: int = 4096,
    timeout: float = 60.0,
    retries: int = 0,
    one_machine: bool = True,
) -> UpdatePlan:
    return UpdatePlan(channel, bucket_bytes, timeout, str(directory), one_machine, retries=retries)


class _Process:
    """A process that answers one call after the other."""

    def __init__(self, program: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=program, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()
        self._begun = self._done = 0
        self._answers: dict[int, Any] = {}

    def begin(self, call: str, *arguments: Any) -> tuple[_Process, int]:
        try:
            self.pipe.send((call, arguments))
        except OSError as error:
            raise RuntimeError("the process has died") from error
        self._begun += 1
        return self, self._begun

    def call(self, call: str, *arguments: Any) -> Any:
        _, number = self.begin(call, *arguments)
        return self.answer(number, 60.0)

    def answer(self, number: int, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while number not in self._answers:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            try:
                answer = self.pipe.recv()
            except (EOFError, OSError) as error:
                raise RuntimeError("the process has died") from error
            self._done += 1
            self._answers[self._done] = answer
        answer = self._answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self.begin("end")
            self.process.join(30)
        self.kill()


class ProcessCalls:
    """``train.weight_sync.updater.Calls`` over pipes. ``before``: called with the name of every call to the engine, and
    ``with_bucket`` with what it is to take."""

    def __init__(self, trainer: _Process, engine: _Process) -> None:
        self.trainer, self.engine = trainer, engine
        self.before: Callable[[str], None] = lambda call: None
        self.with_bucket: Callable[[Any], None] = lambda bucket: None

    def sending(self, call: str, *arguments: Any) -> Sequence[Any]:
        return [self.trainer.begin(call, *arguments)]

    def receiving(self, call: str, *arguments: Any) -> Any:
        self.before(call)
        if call == "take":
            self.with_bucket(arguments[0])
        return self.engine.begin(call, *arguments)

    def wait(self, begun: Sequence[Any], timeout: float) -> list[Any]:
        return [process.answer(number, timeout) for process, number in begun]


def start_trainer(model_dir: Path, network: str | None = None) -> _Process:
    """``network``: the network namespace that it is in; None: that of the tests."""
    return _Process(_trainer_program, model_dir, network)


def start_engine(model_dir: Path, network: str | None = None) -> _Process:
    return _Process(_engine_program, model_dir, network)


def _enter(network: str | None) -> None:
    if network is None:
        return
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # as on a machine of its own
    with open(f"/var/run/netns/{network}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {network}")


def _trainer_program(pipe: multiprocessing.connection.Connection, model_dir: Path, network: str | None) -> None:
    _enter(network)
    torch.set_num_threads(1)
    trainer = make_trainer(run_config(model_dir))
    end = SendingEnd(trainer.export_weights, selected_accelerator(), rank=0)
    batch = make_batch(model_dir)
    own = {
        "train": lambda: trainer.train(batch, 0)["train/loss"],
        "save_hf": lambda directory: trainer.save_hf(directory),
    }
    _serve(pipe, end, own)
    trainer.close(update_groups=[end.close])


def _engine_program(pipe: multiprocessing.connection.Connection, model_dir: Path, network: str | None) -> None:
    _enter(network)
    torch.set_num_threads(1)
    engine = BlockingEngine(model_dir)
    end = ReceivingEnd(engine, selected_accelerator())
    _serve(pipe, end, {"greedy": engine.greedy, "state": engine.state})
    end.close()
    engine.close()


def _serve(pipe: multiprocessing.connection.Connection, end: Any, own: dict[str, Callable[..., Any]]) -> None:
    while True:
        call, arguments = pipe.recv()
        if call == "end":
            return
        try:
            result = own[call](*arguments) if call in own else getattr(end, call)(*arguments)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            result = error
        pipe.send(result)
