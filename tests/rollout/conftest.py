"""Tiny random models and an engine that serves them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from rollout.engines.sglang.http import HttpClient

VOCAB = 90


@dataclass(frozen=True)
class TinyModel:
    directory: Path
    reference: Any  # the transformers model, fp32

    def log_probs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Of each next token after each position of ``tokens``, by transformers: [tokens, vocab]."""
        with torch.no_grad():
            return torch.log_softmax(self.reference(torch.tensor([tokens])).logits[0] / temperature, dim=-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()

    def weights(self) -> dict[str, torch.Tensor]:
        """Tensors as they stand in the directory."""
        from safetensors.torch import load_file

        return load_file(self.directory / "model.safetensors")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """``tiny_model(family, tied=..., **config)``: built once per set of arguments. Token 0 ends a response; token
    ``i`` above 0 is the character ``chr(0x20 + i)``."""
    built: dict[Any, TinyModel] = {}

    def build(family: str = "qwen3", *, tied: bool = True, seed: int = 0, **settings: Any) -> TinyModel:
        key = (family, tied, seed, repr(settings))
        if key not in built:
            built[key] = _build(tmp_path_factory.mktemp(family), family, tied, seed, settings)
        return built[key]

    return build


@pytest.fixture
def serve() -> Callable[..., Any]:
    """``async with serve(model, **arguments) as engine``: a started engine, stopped afterwards.

    On the CPU, unless ``ACCELRL_ACCELERATOR`` names another: test_emulated_engine.py runs the same tests elsewhere.
    """
    from accel import select_accelerator
    from rollout.engines.torch_engine import TorchEngine

    accelerator = select_accelerator(os.environ.get("ACCELRL_ACCELERATOR", "cpu"))

    @contextlib.asynccontextmanager
    async def serving(model: TinyModel, **arguments: Any) -> AsyncIterator[Any]:
        settings = {"dtype": torch.float32, "max_running_requests": 32, "max_context_len": 256, "threads": 1}
        engine = TorchEngine(model.directory, accelerator, **(settings | arguments))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()

    return serving


def _build(directory: Path, family: str, tied: bool, seed: int, settings: dict[str, Any]) -> TinyModel:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    tokens = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(family, **(sizes | tokens | settings))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # as initialised, a tiny model says nearly the same after every prompt
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=_characters(), eos_token="<eos>").save_pretrained(directory)
    return TinyModel(directory, model)


def _characters() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<eos>": 0} | {chr(0x20 + index): index for index in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.fixture
async def http_server() -> AsyncIterator[Callable[..., Any]]:
    """Start an HTTP server of one handler for every path; its address comes back."""
    runners: list[web.AppRunner] = []

    async def start(handler: Callable[..., Any]) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpClient]:
    """A client of servers that tries again at once."""
    monkeypatch.setattr("rollout.engines.sglang.http._FIRST_BACKOFF", 0.01)
    client = HttpClient(connections=8, retries=3, timeout=5)
    yield client
    await client.close()
