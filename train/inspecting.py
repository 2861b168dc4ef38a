"""``python -m train inspect DIR``: what would be built from a model directory, before any of it is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samples.errors import InputError
from train.config.sections import ParallelConfig

if TYPE_CHECKING:
    from train.megatron.models.family import ModelFamily

SIZES_TRIED = (1, 2, 4, 8, 16, 32, 64)


def main(argv: list[str]) -> int:
    """Run ``accelrl inspect`` with ``argv``; returns the exit status. Raises InputError for what cannot be used."""
    arguments = _parser().parse_args(argv)

    from train.megatron.model import load_hf_config, read_config_json
    from train.megatron.models import family_of
    from train.megatron.weights.loading import check_weights

    hf_config = load_hf_config(arguments.directory, arguments.trust_remote_code, "inspect")
    family = family_of(hf_config, "inspect")
    published = read_config_json(arguments.directory, "inspect")["model_type"]
    name = published if published == family.model_type else f"{published}, of the shape of {family.model_type}"
    lines = [f"{arguments.directory}: {name}, {hf_config.num_hidden_layers} layers", ""]
    lines += _parameters(family, hf_config)
    lines += ["", *_layouts(hf_config)]
    lines += ["", *_memory(family, hf_config, arguments)]
    lines += ["", *_table(family, hf_config)]
    try:
        check_weights(family, hf_config, arguments.directory, "inspect")
        lines += ["", "Files: every tensor of the table is there, in its shape."]
    except InputError as error:
        lines += ["", f"Files: {error}"]
        print("\n".join(lines))
        return 1
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train inspect",
        description="Say which family a Hugging Face model directory is of, how large it is, how it can be divided, "
        "and where each of its tensors goes.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", help="Hugging Face model directory; only headers of files are read")
    for axis in ("tensor-model", "pipeline-model", "expert-model", "data"):
        parser.add_argument(f"--{axis}-parallel-size", type=_size, default=1, metavar="N", help="of the memory shown")
    parser.add_argument("--bf16", action="store_true", help="show memory for training in bfloat16")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings along")
    return parser


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"has to be at least 1, not {value}")
    return value


def _parameters(family: ModelFamily, hf_config: Any) -> Iterator[str]:
    from train.megatron.model_size import active_parameters, parameters_by_part

    parts = parameters_by_part(family, hf_config)
    total = sum(count for part, count in parts.items() if "buffers" not in part)
    yield "Parameters"
    for part, count in parts.items():
        yield f"  {part:28} {count:>18,}"
    yield f"  {'total trained':28} {total:>18,}"
    if family.experts(hf_config):
        yield f"  {'that a token goes through':28} {active_parameters(family, hf_config):>18,}"
    if hf_config.tie_word_embeddings:
        yield "  The head is the embedding (tie_word_embeddings)."


def _layouts(hf_config: Any) -> Iterator[str]:
    yield "Sizes that divide it"
    for flag, field in (
        ("--tensor-model-parallel-size", "tensor_model_parallel_size"),
        ("--pipeline-model-parallel-size", "pipeline_model_parallel_size"),
        ("--expert-model-parallel-size", "expert_model_parallel_size"),
    ):
        sizes = [size for size in SIZES_TRIED if _divides(hf_config, **{field: size})]
        yield f"  {flag:32} {', '.join(map(str, sizes))}"


def _divides(hf_config: Any, **sizes: int) -> bool:
    from train.megatron.layout import check_layout

    try:
        check_layout(hf_config, _parallel(**sizes))
    except InputError:
        return False
    return True


def _parallel(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**sizes, sequence_parallel=sizes.get("tensor_model_parallel_size", 1) > 1)


def _memory(family: ModelFamily, hf_config: Any, arguments: argparse.Namespace) -> Iterator[str]:
    from train.megatron.model_size import GIB, rank_memory

    sizes = {
        f"{axis}_model_parallel_size": getattr(arguments, f"{axis}_model_parallel_size")
        for axis in ("tensor", "pipeline", "expert")
    }
    memory = rank_memory(
        family,
        hf_config,
        _parallel(**sizes),
        data_parallel_size=arguments.data_parallel_size,
        bf16=arguments.bf16,
    )
    layout = " x ".join(f"{name.partition('_')[0]} {size}" for name, size in sizes.items())
    yield (
        f"Memory of the fullest rank ({layout} x data {arguments.data_parallel_size}, "
        f"{'bfloat16' if arguments.bf16 else 'float32'}; activations come on top)"
    )
    for part in ("weights", "gradients", "optimizer", "total"):
        yield f"  {part:28} {getattr(memory, part) / GIB:>14.3f} GiB"


def _table(family: ModelFamily, hf_config: Any) -> Iterator[str]:
    yield "Weight table (Megatron's parameter <- Hugging Face's tensors: transform, how ranks share it, layers)"
    placed = family.weights.place(hf_config)
    layers: dict[int, set[int]] = {}
    for weight in placed.values():
        layers.setdefault(id(weight.entry), set())
        if weight.layer is not None:
            layers[id(weight.entry)].add(weight.layer)
    for entry in family.weights.entries:
        if id(entry) not in layers:
            continue
        tied = entry.tied_to is not None and hf_config.tie_word_embeddings
        shared = "whole on each rank" if entry.split is None else f"tensor parallel along axis {entry.split}"
        if entry.per_expert:
            shared = "expert parallel, stacked" if entry.stacked else "expert parallel"
        notes = [entry.transform.name, "tied" if tied else shared, *(["buffer"] if entry.buffer else [])]
        if entry.per_layer:
            notes.append(_ranges(sorted(layers[id(entry)])))
        yield f"  {entry.megatron}"
        for name in (entry.tied_to,) if tied else entry.hf:
            yield f"      <- {name}"
        yield f"      {': '.join((notes[0], ', '.join(notes[1:])))}"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "layers " + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
