"""Every family's weight table, at once: it names each tensor and each parameter once, and inverts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train.model_cases import EVERY_MODEL, KINDS, load, on_disk, save_tiny, tiny_config
from train.megatron.models import FAMILIES, SUPPORTED
from train.megatron.weights.binding import BoundWeight, whole_model_names
from train.megatron.weights.table import COLUMN, PlacedWeight, WeightEntry, WeightTable
from train.megatron.weights.transforms import (
    IDENTITY,
    MERGE_GATE_UP,
    MERGE_QK,
    MERGE_QKV,
    TRANSFORMS,
    TRANSPOSE,
    TRANSPOSE_GATE_UP,
    HeadGeometry,
)


def test_every_family_is_in_these_tests():
    assert {kind.partition("/")[0] for kind in KINDS} == set(SUPPORTED)


@pytest.mark.parametrize(("model_type", "tied"), EVERY_MODEL)
def test_table_names_every_tensor_that_transformers_saves_once(model_type, tied):
    config = tiny_config(model_type, tied)
    with torch.device("meta"):
        reference = on_disk(KINDS[model_type][1](config))
    family = FAMILIES[config.model_type]
    placed = [weight for weight in family.weights.place(config).values() if not weight.tied]
    named = [(name, weight.expert if weight.stack else None) for weight in placed for name in weight.hf]
    assert len(named) == len(set(named))
    assert {name for name, _ in named} == reference.keys()
    shapes = family.shapes(config)
    for weight in placed:
        for name, pattern in zip(weight.hf, weight.patterns, strict=True):
            assert (shapes.get(name) or shapes[pattern]) == reference[name].shape, name


@pytest.mark.parametrize(("model_type", "tied"), EVERY_MODEL)
def test_table_names_every_parameter_of_the_megatron_model(one_rank, tmp_path, model_type, tied):
    save_tiny(tmp_path, model_type, tied)
    loaded = load(tmp_path)
    placed = loaded.family.weights.place(loaded.hf_config)
    only_in_table = placed.keys() - whole_model_names(loaded.model).keys()
    assert only_in_table == ({"output_layer.weight"} if tied else set())


@pytest.mark.parametrize(("model_type", "tied"), EVERY_MODEL)
def test_hugging_face_to_megatron_and_back_is_bit_equal(one_rank, tmp_path, model_type, tied):
    reference = save_tiny(tmp_path, model_type, tied)
    exported = load(tmp_path).tensors()
    expected = on_disk(reference)
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_table_that_names_something_twice_is_refused():
    config = tiny_config("llama")
    norm = WeightEntry("decoder.final_layernorm.weight", ("model.norm.weight",))
    with pytest.raises(ValueError, match=r"two rows.*decoder\.final_layernorm"):
        WeightTable((norm, WeightEntry(norm.megatron, ("other",)))).place(config)
    with pytest.raises(ValueError, match=r"model\.norm\.weight belongs to two parameters"):
        WeightTable((norm, WeightEntry("other", norm.hf))).place(config)
    with pytest.raises(ValueError, match="joins 2 tensors, 1 named"):
        WeightEntry("fc1", ("gate",), MERGE_GATE_UP)


def test_a_parameter_without_a_row_is_refused(one_rank, tmp_path):
    save_tiny(tmp_path, "llama")
    loaded = load(tmp_path)
    loaded.model.register_parameter("stray", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="llama weight table has no row for stray"):
        loaded.tensors()


def test_all_transforms_are_in_the_property_test():
    assert set(TRANSFORMS) == {IDENTITY, MERGE_QKV, MERGE_QK, MERGE_GATE_UP, TRANSPOSE, TRANSPOSE_GATE_UP}


WHOLE_EXPERTS = (TRANSPOSE, TRANSPOSE_GATE_UP)  # of parameters that no tensor-parallel ranks share
sizes = st.integers(1, 4)


@st.composite
def weights(draw):
    """A row, and the whole Hugging Face tensors that it joins, for some tensor-parallel size."""
    transform = draw(st.sampled_from([t for t in TRANSFORMS if t not in WHOLE_EXPERTS]))
    ranks, columns, bias = draw(sizes), draw(sizes), draw(st.booleans())
    heads = HeadGeometry(head_dim=draw(sizes), queries_per_group=draw(sizes))
    groups = ranks * draw(sizes)
    rows = {
        IDENTITY: [groups],
        MERGE_GATE_UP: [groups, groups],
        MERGE_QK: [groups * heads.queries_per_group * heads.head_dim, groups * heads.head_dim],
        MERGE_QKV: [groups * heads.queries_per_group * heads.head_dim, *[groups * heads.head_dim] * 2],
    }[transform]
    shapes = [(count,) if bias else (count, columns) for count in rows]
    whole = sum(torch.Size(shape).numel() for shape in shapes)
    values = torch.randperm(whole, generator=torch.Generator().manual_seed(0)).float()
    tensors = [
        part.view(shape)
        for part, shape in zip(values.split([torch.Size(s).numel() for s in shapes]), shapes, strict=True)
    ]
    entry = WeightEntry("p", tuple(f"t{i}" for i in range(transform.parts)), transform, split=COLUMN)
    return entry, heads, ranks, tensors


@given(weights())
def test_transforms_invert_for_any_shape_and_tensor_parallel_size(case):
    entry, heads, ranks, tensors = case
    local = (sum(len(tensor) for tensor in tensors) // ranks, *tensors[0].shape[1:])
    parameters = [torch.full(local, -1.0) for _ in range(ranks)]
    for rank, parameter in enumerate(parameters):
        weight = BoundWeight(PlacedWeight(entry, "p", entry.hf), parameter, heads, 0, ranks)
        for (shard, region), tensor in zip(weight.shards(rank), tensors, strict=True):
            assert shard.shape == tensor.shape
            region.copy_(tensor[shard.start : shard.stop].reshape(region.shape))
        assert parameter.min() >= 0, "a region leaves a part of the parameter out"
    together = torch.cat([parameter.flatten() for parameter in parameters])
    assert torch.equal(together.sort().values, torch.arange(len(together)).float()), "regions overlap"
    slices = [entry.transform.read(parameter, heads) for parameter in parameters]
    for tensor, pieces in zip(tensors, zip(*slices, strict=True), strict=True):
        assert torch.equal(torch.cat(pieces), tensor)


@given(st.sampled_from(WHOLE_EXPERTS), sizes, sizes, st.booleans(), sizes)
def test_transforms_of_experts_invert_for_any_shape(transform, width, inputs, bias, count):
    """All experts of a layer in one tensor, each turned around."""
    rows = 2 * width
    shape = (rows,) if bias else (inputs, rows)
    stacked = torch.arange(count * torch.Size(shape).numel()).float().view(count, *shape)
    entry = WeightEntry("p.{expert}", ("stack",), transform)
    experts = [torch.full((rows,) if bias else (rows, inputs), -1.0) for _ in range(count)]
    for number, parameter in enumerate(experts):
        placed = PlacedWeight(entry, "p", ("stack",), expert=number, stack=count)
        ((shard, region),) = BoundWeight(placed, parameter, HeadGeometry(1, 1), 0, 1).shards(0)
        assert (shard.shape, shard.index) == (stacked.shape, number)
        region.copy_(stacked[number].view(region.shape))
        assert parameter.min() >= 0, "a region leaves a part of the parameter out"
    back = torch.stack([transform.read(parameter, HeadGeometry(1, 1))[0] for parameter in experts])
    assert torch.equal(back, stacked)


def test_gate_and_up_alternate_in_a_stacked_expert():
    """Gate rows 0, 1 and up rows 2, 3 of three columns: the tensor's rows are the columns, gate and up in turn."""
    (tensor,) = TRANSPOSE_GATE_UP.read(torch.arange(12.0).view(4, 3), HeadGeometry(1, 1))
    assert tensor.tolist() == [[0, 6, 3, 9], [1, 7, 4, 10], [2, 8, 5, 11]]


def test_query_groups_lie_as_megatron_splits_them():
    """Two groups of two query heads of one element: q0 q1 k0 v0 q2 q3 k1 v1."""
    queries, keys, values = MERGE_QKV.read(torch.arange(8.0), HeadGeometry(head_dim=1, queries_per_group=2))
    assert (queries.tolist(), keys.tolist(), values.tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])
