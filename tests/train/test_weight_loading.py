"""Reading Hugging Face directories: shards, dtypes, tied copies, padding, and one clear error for each broken one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from samples.errors import InputError
from tests.train.model_cases import Loaded, load, save_tiny, tiny_config
from train.config.run import RunConfig
from train.megatron.model import PADDED_LOGIT, build_model
from train.megatron.models import FAMILIES, decoder
from train.megatron.weights.binding import BoundWeight
from train.megatron.weights.checkpoint import HfCheckpoint
from train.megatron.weights.loading import LoadReport, check_weights, load_hf_weights, load_weight, what_ranks_read
from train.megatron.weights.table import PlacedWeight
from train.megatron.weights.transforms import HeadGeometry

pytestmark = pytest.mark.usefixtures("one_rank")

NORM = "model.norm.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def refusal(directory) -> str:
    with pytest.raises(InputError) as caught:
        load(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), ["1 tensors", NORM, "not there"]),
        (lambda t: t.update({"model.norms.weight": t.pop(NORM)}), [NORM, "nearest", "model.norms.weight"]),
        (lambda t: t.update(extra=torch.ones(1)), ["no parameter", "extra in model.safetensors", "config.json"]),
        (lambda t: t.update({GATE: t[GATE][1:]}), [GATE, "[47, 32]", "[48, 32]"]),
        (lambda t: t.update({GATE: t[GATE].int()}), [GATE, "I32", "BF16"]),
    ],
    ids=["missing", "renamed", "extra", "misshapen", "wrong dtype"],
)
def test_tensors_that_do_not_fit_are_one_clear_error(tmp_path, change, words):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, change)
    message = refusal(tmp_path)
    assert message.startswith("--hf-checkpoint")
    for word in [*words, str(tmp_path)]:
        assert word in message


def two_shards(directory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Cut a model in two files; returns what each holds."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    first, second = ({name: t for name, t in tensors.items() if (NORM in name) == own} for own in (True, False))
    save_file(first, directory / "a.safetensors")
    save_file(second, directory / "b.safetensors")
    index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return first, second


@pytest.mark.parametrize(("name", "says"), [("extra", "does not name it"), (GATE, "says it is in b.safetensors")])
def test_a_shard_with_a_tensor_that_the_index_does_not_place_there_is_refused(tmp_path, name, says):
    hf_config = save_tiny(tmp_path, "llama").config
    first, _ = two_shards(tmp_path)
    check_weights(FAMILIES["llama"], hf_config, tmp_path)
    save_file(first | {name: torch.ones(48, 32)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=rf"a.safetensors holds {name}, but .*{says}"):
        check_weights(FAMILIES["llama"], hf_config, tmp_path)


def test_an_index_that_names_a_file_too_long_to_exist_is_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    two_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: "a" * 300}}))
    assert "is missing" in refusal(tmp_path)


def test_a_gguf_file_is_said_not_to_be_read(tmp_path):
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "model.gguf")
    assert "model.gguf is not read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update({GATE + "_scale_inv": torch.ones(1, 1)}), "are the files of two checkpoints mixed"),
        (
            lambda t: t.update(
                {GATE: t[GATE].to(torch.float8_e4m3fn), GATE + "_scale_inv": torch.ones(1, 1, dtype=torch.int64)}
            ),
            "stored as I64",  # asked before the config's quantization_config
        ),
        (lambda t: t.update({NORM + "_blocks": t[NORM].clone(), NORM + "_scales": t[NORM].clone()}), "is there twice"),
        (lambda t: t.update({NORM + "_blocks": t.pop(NORM), NORM + "_scales": t[GATE][0].clone()}), "only experts'"),
    ],
    ids=["scales of a plain weight", "integer scales", "MXFP4 beside the plain", "MXFP4 norm"],
)
def test_quantised_parts_that_do_not_fit_are_refused(tmp_path, change, says):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, change)
    assert says in refusal(tmp_path)


def test_truncated_file_is_named(tmp_path):
    save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} (" in refusal(tmp_path)
    assert "cut short" in refusal(tmp_path)


def test_pickles_are_refused_with_the_way_out(tmp_path):
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert "pytorch_model.bin is a pickle" in message
    assert "save_pretrained" in message


def test_directory_without_weights_says_so(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    assert "neither model.safetensors nor" in refusal(tmp_path)


def test_sharded_directory_equals_a_single_file(tmp_path):
    model = save_tiny(tmp_path / "one", "qwen2")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = load(tmp_path / "one").tensors(), load(tmp_path / "many").tensors()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_index_that_does_not_match_its_files_is_named(tmp_path):
    model = save_tiny(tmp_path / "one", "qwen2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    first, other = sorted(set(index["weight_map"].values()))[:2]
    name = next(name for name, file in index["weight_map"].items() if file == first)

    index_file.write_text(json.dumps({"weight_map": index["weight_map"] | {name: other}}))
    assert f"{other} does not hold {name}" in refusal(tmp_path)
    (tmp_path / first).unlink()
    index_file.write_text(json.dumps(index))
    assert f"{first} is missing" in refusal(tmp_path)
    index_file.write_text("[]")
    assert "not an index" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_values_are_converted_to_the_parameters_dtype(tmp_path, dtype):
    save_tiny(tmp_path, "qwen3")
    rewrite(tmp_path, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in load(tmp_path).tensors().items():
        assert torch.equal(tensor, stored[name].float()), name


def test_each_rank_reads_what_it_holds_and_no_more(tmp_path):
    model = save_tiny(tmp_path, "qwen3")
    config = tiny_config("qwen3")
    report = load_hf_weights(build_model(config, RunConfig()), FAMILIES["qwen3"], config, tmp_path)
    assert report.bytes_read == 4 * sum(parameter.numel() for parameter in model.parameters())
    size = f"{report.bytes_read / 1e6:,.1f} MB in {report.tensors} tensors"
    assert what_ranks_read([report, LoadReport(1, 10**9)]) == (
        f"weights read: rank 0 {size}; rank 1 1,000.0 MB in 1 tensors"
    )
    many = [*[report] * 7, LoadReport(1, 0), LoadReport(1, 10**9)]
    assert what_ranks_read(many) == (
        "weights read by 9 ranks: least rank 7 0.0 MB in 1 tensors; most rank 8 1,000.0 MB in 1 tensors"
    )
    assert report.tensors == len(list(model.parameters()))


@pytest.mark.parametrize("model_type", ["qwen3", "glm4", "deepseek_v3", "gpt_oss", "gemma4_text/experts"])
def test_files_are_let_go_and_large_tensors_read_in_pieces(tmp_path, monkeypatch, model_type):
    save_tiny(tmp_path, model_type)
    expected = load(tmp_path).tensors()
    monkeypatch.setattr("train.megatron.weights.loading._half_a_layer", lambda _: 1000)
    most = 0
    let_go = HfCheckpoint.let_go

    def watched(checkpoint, beyond=0):
        nonlocal most
        let_go(checkpoint, beyond)
        most = max(most, checkpoint._mapped)

    monkeypatch.setattr(HfCheckpoint, "let_go", watched)
    config = tiny_config(model_type)
    family = FAMILIES[config.model_type]
    loaded = Loaded(build_model(config, RunConfig()), family, config)
    report = load_hf_weights(loaded.model, family, config, tmp_path)
    assert most <= 1000
    assert report.bytes_read == 4 * sum(tensor.numel() for tensor in expected.values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.tensors().items())


def test_rotary_frequencies_in_old_llama_files_are_passed_over(tmp_path):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(tmp_path)


def test_a_tied_head_in_the_file_has_to_be_the_embedding(tmp_path):
    save_tiny(tmp_path, "llama", tied=True)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load(tmp_path).tensors()
    rewrite(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    assert "tie_word_embeddings" in refusal(tmp_path)


def test_padded_vocabulary_is_zero_masked_and_cut_off_again(tmp_path, monkeypatch):
    reference = save_tiny(tmp_path, "qwen3")
    # as if two ranks shared the vocabulary: 67 entries become 68
    monkeypatch.setattr("train.megatron.model.padded_vocab_size", lambda config, size: config.vocab_size + 1)
    loaded = load(tmp_path)
    assert loaded.model.output_layer.weight[67:].tolist() == [[0.0] * 32]
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        logits, expected = loaded.model(tokens, None, None), reference(tokens).logits
    assert logits[..., 67].unique().tolist() == [PADDED_LOGIT]
    torch.testing.assert_close(logits.log_softmax(-1)[..., :67], expected.log_softmax(-1), rtol=0, atol=1e-5)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert entropy.isfinite().all()
    assert torch.equal(loaded.tensors()["lm_head.weight"], reference.lm_head.weight)


@pytest.mark.parametrize(("entry", "rank"), [(decoder.EMBEDDING, 0), (decoder.EMBEDDING, 1), (decoder.HEAD, 1)])
def test_pieces_of_a_rank_are_its_rows_and_padding_is_zero(tmp_path, entry, rank):
    """67 entries of a vocabulary between two ranks: 34, and 33 with one of padding."""
    save_tiny(tmp_path, "llama")
    whole = load_file(tmp_path / "model.safetensors")[entry.hf[0]]
    parameter = torch.full((34, 32), -7.0)
    weight = BoundWeight(PlacedWeight(entry, entry.megatron, entry.hf), parameter, HeadGeometry(8, 2), 67, 2)
    with HfCheckpoint(tmp_path) as checkpoint:
        load_weight(weight, checkpoint, rank, beyond=5 * 32 * 4)
        mine = whole[34 * rank : 34 * rank + 34]
        assert checkpoint.bytes_read == mine.numel() * 4
    assert torch.equal(parameter[: len(mine)], mine)
    assert not parameter[len(mine) :].any()
