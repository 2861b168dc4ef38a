"""Every family against transformers, on one rank and on two real ones that share a model: one table, printed."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.testing import assert_close

from accel.backends.cpu import CpuAccelerator
from tests.train.model_cases import EVERY_MODEL, KINDS, load, on_disk, save_tiny, tiny_config
from train.config.run import RunConfig
from train.megatron.models import FAMILIES

LAYOUTS = {
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
    "TP 2 x EP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
}
BF16 = "  bf16: ours, HF's, both"
Key = tuple[str, bool]


def directory_of(model: Key, root: Path) -> Path:
    return root / f"{model[0].replace('/', ' ')}-{'tied' if model[1] else 'untied'}"


def models_of(layout: str) -> list[Key]:
    """One of each family; pipeline stages also with the head and the embedding tied across them."""
    tied = (False, True) if layout == "PP 2" else (False,)
    with_experts = "EP" in layout
    return [model for model in EVERY_MODEL if model[1] in tied and (not with_experts or has_experts(model[0]))]


def has_experts(model_type: str) -> bool:
    return FAMILIES[tiny_config(model_type).model_type].experts(tiny_config(model_type)) > 0


def one_rank_of_two(rank: int, layout: str, root: Path) -> None:
    """All of a layout's models, one after the other; what this rank found is written for the parent to read."""
    from train.megatron.bootstrap import prepare_megatron
    from train.megatron.parallel import join_ranks, leave_ranks

    torch.set_num_threads(1)
    accelerator = CpuAccelerator()
    prepare_megatron(accelerator)
    config = RunConfig.model_validate({"parallel": LAYOUTS[layout]})
    join_ranks(config, accelerator, rank=rank, world_size=2, store_path=str(root / f"store {layout}"))
    try:
        found = {model: on_this_rank(directory_of(model, root), config, rank, layout) for model in models_of(layout)}
        (root / f"{layout} {rank}").write_bytes(pickle.dumps(found))
    finally:
        leave_ranks(accelerator)


def on_this_rank(directory: Path, config: RunConfig, rank: int, layout: str) -> float | None:
    """Largest difference of this rank's logits; None where it has none. Weights have to come back bit for bit."""
    from train.megatron.weights.loading import load_hf_weights
    from train.megatron.weights.saving import save_hf

    expected = load_file(directory / "model.safetensors")
    loaded = load(directory, config)
    assert_same(loaded.tensors(), expected)
    report = load_hf_weights(loaded.model, loaded.family, loaded.hf_config, directory)
    assert report.bytes_read < sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    out = directory.with_name(f"{directory.name} {layout}")
    save_hf(loaded.model, loaded.family, loaded.hf_config, out, directory)
    assert_same(load_file(out / "model.safetensors"), expected)
    tokens, reference = torch.load(directory / "logits.pt")
    logits = forward(loaded.model, tokens)
    if logits is None:
        return None
    if logits.shape[-1] < reference.shape[-1]:  # a slice of the vocabulary; beyond it, entries that never win
        ranks = 2
        reference = torch.nn.functional.pad(reference, (0, logits.shape[-1] * ranks - reference.shape[-1]), value=-3e4)
        reference = reference.chunk(ranks, dim=-1)[rank]
    return relative_difference(logits, reference)


def forward(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor | None:
    from train.megatron.forward import run_micro_batches
    from train.megatron.micro_batch import MicroBatch

    nothing = torch.zeros(0)
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    batch = MicroBatch(tokens, positions, nothing, nothing, nothing, nothing, None, nothing, 0)
    results = run_micro_batches(model, [batch], lambda _, logits: (logits.new_zeros(()), logits), backward=False)
    return results[0] if results else None


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest logit, vocabulary padding aside."""
    real = expected > -1e4
    return float(((logits - expected)[real].abs().max() / expected[real].abs().max()).detach())


def on_one_rank(directory: Path, model: Key) -> dict[str, str]:
    """Cells of a model that needs no other rank."""
    reference = save_tiny(directory, *model)
    tokens = torch.randint(0, reference.config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    torch.save((tokens, expected.detach()), directory / "logits.pt")
    loaded = load(directory)
    assert_same(loaded.tensors(), on_disk(reference))
    logits = loaded.model(tokens, None, None)
    difference = relative_difference(logits, expected)
    expected.square().mean().backward()
    logits.square().mean().backward()
    gradients = on_disk(reference, {name: parameter.grad for name, parameter in reference.named_parameters()})
    for parameter in loaded.model.parameters():
        parameter.data.copy_(parameter.grad)
    ours = loaded.tensors()
    for name, gradient in gradients.items():
        assert_close(ours[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert difference <= bound(model)
    return {
        "logits": f"{difference:.0e}",
        "gradients": f"{len(gradients)} equal",
        "HF-Megatron-HF": "bit-equal",
        BF16: in_bfloat16(directory, model[0], reference.eval()),
    }


@torch.no_grad()
def in_bfloat16(directory: Path, kind: str, exact: torch.nn.Module) -> str:
    """Differences of logits over their size, by their norms: of ours and of transformers' to float32, and of the two.

    Bounds: rounding costs us at most a quarter more than it does transformers, and half more where it can send a token
    to another expert; without experts, the two are no further apart than transformers and float32, and a quarter.
    """
    config = tiny_config(kind)
    tokens = torch.randint(0, config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(2))
    expected = exact(tokens).logits
    narrow = KINDS[kind][1].from_pretrained(directory, config=exact.config, dtype=torch.bfloat16).eval()
    theirs = narrow(tokens).logits.float()
    ours = load(directory, RunConfig.model_validate({"model": {"bf16": True}})).model(tokens, None, None).float()
    mine, their_own, between = (
        float((a - b).norm() / expected.norm()) for a, b in ((ours, expected), (theirs, expected), (ours, theirs))
    )
    assert mine <= (1.5 if has_experts(kind) else 1.25) * their_own, (kind, mine, their_own)
    assert has_experts(kind) or between <= 1.25 * their_own, (kind, between, their_own)
    return f"{mine:.3f} {their_own:.3f} {between:.3f}"


def width(column: str) -> int:
    return max(16, len(column))


def bound(model: Key) -> float:
    return 1e-4 if has_experts(model[0]) else 1e-5


@pytest.mark.slow
def test_every_cell_of_the_table(one_rank, tmp_path, record_property):
    cells = {model: on_one_rank(directory_of(model, tmp_path), model) for model in EVERY_MODEL}
    for layout in LAYOUTS:
        mp.spawn(one_rank_of_two, (layout, tmp_path), nprocs=2)
        for rank in range(2):
            for model, difference in pickle.loads((tmp_path / f"{layout} {rank}").read_bytes()).items():
                if difference is not None:
                    assert difference <= bound(model), (model, layout, rank)
                    cells[model][layout] = f"{difference:.0e}"
    columns = ["logits", "gradients", "HF-Megatron-HF", *LAYOUTS, BF16]
    lines = [f"{'family':32}" + "".join(f"{column:>{width(column)}}" for column in columns)]
    for model in EVERY_MODEL:
        for layout in LAYOUTS:
            why_empty = "no experts" if "EP" in layout and not has_experts(model[0]) else "as untied"
            cells[model].setdefault(layout, why_empty)
        name = f"{model[0]} {'tied' if model[1] else ''}"
        lines.append(f"{name:32}" + "".join(f"{cells[model][column]:>{width(column)}}" for column in columns))
    record_property("table", "\n".join(lines))
