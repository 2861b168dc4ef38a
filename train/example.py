"""The built-in example: a tiny Qwen3 learns, from random weights, to name the largest of the digits shown.

Nothing about it is special to the loop: it is written to disk as an ordinary Hugging Face directory and two prompt
files, and then trained like any other model on any other prompts.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789", ">"]
PAD, EOS = 0, 1
DIGITS_SHOWN = 3
EVAL_PROMPTS = 200

# Chosen by benchmarks/example_study.py, which shows what goes wrong otherwise: a policy that is sure of a wrong answer
# gets groups of equal rewards, which teach it nothing. Many responses a rollout, further sampling rounds, a moderate
# learning rate, and optimizer steps that are as large when a rollout leaves few groups keep it from getting there.
EXAMPLE_SETTINGS: dict[str, Any] = {
    "label_key": "label",
    "source_key": "source",
    "rm_type": "exact_match",
    "num_rollout": 100,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 16,
    "rollout_max_response_len": 3,
    "eval_interval": 25,
    "dynamic_sampling_filter_path": "filters.check_reward_nonzero_std",
    "max_sampling_rounds": 3,
    "on_sampling_exhausted": "shrink",
    "global_batch_size": 128,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "entropy_coef": 0.01,
    "lr": 1.5e-3,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 5,
    "trainer_threads": 1,
    "rollout_threads": 1,
}


@dataclass(frozen=True)
class ExampleFiles:
    """Where the example's model and prompts were written."""

    hf_checkpoint: Path
    prompt_data: Path
    eval_prompt_data: Path


def write_example(directory: Path, seed: int) -> ExampleFiles:
    """Write model, tokenizer and prompts under ``directory``; the weights and the split depend on ``seed`` alone."""
    files = ExampleFiles(directory / "model", directory / "prompts.jsonl", directory / "eval_prompts.jsonl")
    files.hf_checkpoint.mkdir(parents=True, exist_ok=True)
    _write_model(files.hf_checkpoint, seed)
    _write_tokenizer(files.hf_checkpoint)
    train, held_out = split_prompts(seed)
    _write_prompts(files.prompt_data, train)
    _write_prompts(files.eval_prompt_data, held_out)
    return files


def split_prompts(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All 1000 prompts, shuffled: those trained on, and the 200 that never are."""
    rows = []
    for number in range(10**DIGITS_SHOWN):
        digits = f"{number:0{DIGITS_SHOWN}d}"
        rows.append({"prompt": f"{digits}>", "label": max(digits), "source": "largest_digit"})
    random.Random(seed).shuffle(rows)
    return rows[EVAL_PROMPTS:], rows[:EVAL_PROMPTS]


def model_config() -> dict[str, Any]:
    """The ``config.json`` of a Qwen3 of about 130 thousand parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,  # one for each of two tensor-parallel ranks
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "dtype": "float32",
    }


def _write_model(directory: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save

    from train.checkpoint.tensor_files import write_file

    config = model_config()
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"eos_token_id": EOS, "pad_token_id": PAD}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")

    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0.0, config["initializer_range"], generator=generator)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": matrix(query, hidden),
            prefix + "self_attn.k_proj.weight": matrix(key_value, hidden),
            prefix + "self_attn.v_proj.weight": matrix(key_value, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, query),
            prefix + "self_attn.q_norm.weight": torch.ones(head_dim),
            prefix + "self_attn.k_norm.weight": torch.ones(head_dim),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "mlp.gate_proj.weight": matrix(ffn, hidden),
            prefix + "mlp.up_proj.weight": matrix(ffn, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, ffn),
        }
    tensors["model.norm.weight"] = torch.ones(hidden)
    file = directory / "model.safetensors"
    file.unlink(missing_ok=True)  # of a run that begins again
    write_file(file, [save(tensors, metadata={"format": "pt"})])


def _write_tokenizer(directory: Path) -> None:
    """A tokenizer of single characters, as ``transformers.AutoTokenizer`` loads it."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(VOCABULARY[:3])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
        "model_max_length": model_config()["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_prompts(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
