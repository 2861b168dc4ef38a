"""A model directory that is broken, hostile or nonsense is refused by name before anything is built from it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.engines.torch_engine.checkpoint import checkpoint_files
from rollout.engines.torch_engine.opening import check_model_directory, end_of_sequence_ids, open_config
from rollout.limits import context_limits
from samples.errors import InputError
from samples.model_files import read_weight_index
from tests.train.model_cases import EVERY_MODEL, save_tiny, tiny_config
from train.config.run import RunConfig
from train.config.settings import build
from train.example import write_example
from train.megatron.model import load_hf_config
from train.megatron.models import FAMILIES, family_of
from train.megatron.weights.loading import check_weights
from train.model_preflight import check_served_model, check_trained_model

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("example"), seed=0).hf_checkpoint


@pytest.fixture
def model_dir(whole: Path, tmp_path: Path) -> Path:
    """The built-in example's model, to be broken."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def configure(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def for_model(directory: Path, **values: object) -> RunConfig:
    return build({"hf_checkpoint": str(directory), "prompt_data": ("prompts.jsonl",)} | values)


@pytest.mark.parametrize(("model_type", "tied"), EVERY_MODEL)
def test_the_headers_of_a_whole_checkpoint_fit_its_config(tmp_path: Path, model_type: str, tied: bool) -> None:
    save_tiny(tmp_path, model_type, tied)
    check_weights(FAMILIES[tiny_config(model_type).model_type], tiny_config(model_type, tied), tmp_path)
    config = tiny_config(model_type, tied, vocab_size=68)
    with pytest.raises(InputError, match=r"embed_tokens\.weight .* has shape \[67, 32\], the config asks for \[68"):
        check_weights(FAMILIES[config.model_type], config, tmp_path)


def test_a_whole_model_is_accepted(model_dir: Path) -> None:
    check_trained_model(for_model(model_dir, ref_load=str(model_dir), kl_loss_coef=0.1))
    check_served_model(for_model(model_dir, rollout_stop_token_ids=(13,)), "torch", model_dir)


def _cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BROKEN = {
    "cut short": (_cut, "cut short"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "cut short"),
    "garbage": (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 1000), "cut short"),
    "a pickle": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "is a pickle"),
    "gone": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors.index.json"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_weights_that_are_missing_or_broken_are_found_by_trainer_and_engine(model_dir: Path, kind: str) -> None:
    damage, says = BROKEN[kind]
    damage(model_dir)
    with pytest.raises(InputError, match=says) as refusal:
        check_trained_model(for_model(model_dir))
    assert str(refusal.value).startswith("--hf-checkpoint")
    with pytest.raises(InputError, match=says) as refusal:
        check_model_directory(model_dir)
    assert str(model_dir) in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({UP: None}, rf"{UP}.*not there|not there.*{UP}"),
        ({UP: torch.zeros(2, 64)}, r"has shape \[2, 64\]"),
        ({UP: torch.zeros(256, 64, dtype=torch.int8)}, "stored as I8"),
        ({"more": torch.zeros(1)}, "more in model.safetensors"),
    ],
    ids=["missing", "misshapen", "integers", "unknown"],
)
def test_tensors_that_do_not_fit_are_named_with_the_flag_of_their_directory(
    whole: Path, model_dir: Path, changes: dict[str, torch.Tensor | None], says: str
) -> None:
    rewrite(model_dir, **changes)
    with pytest.raises(InputError, match=f"^--hf-checkpoint.*(?:{says})"):
        check_trained_model(for_model(model_dir))
    with pytest.raises(InputError, match=f"^--ref-load.*(?:{says})"):
        check_trained_model(for_model(whole, ref_load=str(model_dir), kl_loss_coef=0.1))


def test_a_reference_of_another_architecture_is_refused_though_its_shapes_fit(whole: Path, model_dir: Path) -> None:
    configure(model_dir, rms_norm_eps=1e-3)
    with pytest.raises(InputError, match=r"--ref-load.*rms_norm_eps is 0.001"):
        check_trained_model(for_model(whole, ref_load=str(model_dir), kl_loss_coef=0.1))


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{",
        "[" * 100_000,
        '{"weight_map": ["a"]}',
        '{"weight_map": null}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["model.safetensors"]}}',
    ],
    ids=range(9),
)
def test_an_index_that_is_none_is_refused(model_dir: Path, index: str) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "part.safetensors")
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=r"^--hf-checkpoint.*index\.json is not an index"):
        check_trained_model(for_model(model_dir))
    with pytest.raises(InputError, match=r"index\.json is not an index"):
        check_model_directory(model_dir)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "sub/x.safetensors", "..", ".", "", "a\\b", "a\0b", "ABSOLUTE"]
)
def test_an_index_names_files_beside_it_only(tmp_path: Path, name: str) -> None:
    for place in ("", "model", "model/sub"):
        (tmp_path / place).mkdir(exist_ok=True)
    for file in ("other.safetensors", "model/sub/x.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / file)
    name = str(tmp_path / "other.safetensors") if name == "ABSOLUTE" else name
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InputError, match="is not the name of a file beside it"):
        read_weight_index(index)
    with pytest.raises(InputError, match="is not the name of a file beside it"):
        checkpoint_files(tmp_path / "model")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", -2),
        ("hidden_size", 10**11),
        ("hidden_size", 0),
        ("vocab_size", 10**12),
        ("intermediate_size", 10**12),
        ("num_hidden_layers", 10**10),
        ("num_hidden_layers", 0),
        ("head_dim", 7),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -5),
        ("rms_norm_eps", -1.0),
        ("rope_theta", math.inf),
    ],
)
def test_nonsense_sizes_are_refused_by_field_and_value(model_dir: Path, field: str, value: float) -> None:
    configure(model_dir, **{field: value})
    says = rf"config\.json: num_(attention|key_value)_heads=|{field}={value}"
    with pytest.raises(InputError, match=says):
        load_hf_config(model_dir)
    with pytest.raises(InputError, match=says):
        open_config(model_dir)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 3),
        ("architectures", [3]),
        ("dtype", []),
        ("model_type", ["qwen3"]),
        ("rope_theta", None),
        ("rope_theta", "wide"),
        ("rope_theta", 10**30),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        ("rope_parameters", {"rope_type": ["default"], "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
        ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        ("rope_scaling", {"type": "linear", "factor": "two"}),
    ],
)
def test_entries_of_another_kind_are_one_clear_error(model_dir: Path, field: str, value: object) -> None:
    configure(model_dir, **{field: value})
    with pytest.raises(InputError, match=r"^--hf-checkpoint"):
        check_trained_model(for_model(model_dir))


def test_the_default_of_a_missing_size_is_checked_too(model_dir: Path) -> None:
    config = tiny_config("llama", num_attention_heads=4, num_key_value_heads=2)
    config.num_key_value_heads = 3
    with pytest.raises(InputError, match="num_key_value_heads=3 does not divide num_attention_heads=4"):
        family_of(config)


def test_a_context_length_that_is_no_length_is_refused_where_limits_are_made(model_dir: Path) -> None:
    configure(model_dir, max_position_embeddings=-5)
    config = RunConfig()
    with pytest.raises(InputError, match="max_position_embeddings=-5"):
        context_limits(model_dir, config.rollout, config.data)


def test_a_huge_context_length_costs_no_memory(model_dir: Path) -> None:
    from rollout.engines.torch_engine.dense import DenseDecoder

    configure(model_dir, max_position_embeddings=10**12)
    check_trained_model(for_model(model_dir))
    decoder = DenseDecoder(
        open_config(model_dir), dtype=torch.float32, device=torch.device("cpu"), max_rows=4, max_len=10**12,
        max_total_tokens=None, free_memory=1 << 30, threads=1,
    )  # fmt: skip
    assert decoder.cache_tokens > 0


@pytest.mark.parametrize(
    "content", ["{", "[]", "null", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}', '{"eos_token_id": 1.5}']
)
def test_a_broken_generation_config_is_named(model_dir: Path, content: str) -> None:
    from samples.tokenizer import load_tokenizer

    (model_dir / "generation_config.json").write_text(content)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        check_model_directory(model_dir)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        end_of_sequence_ids(model_dir, open_config(model_dir), load_tokenizer(model_dir))


@pytest.mark.parametrize("code", ["", "import no_such_module_at_all\n", "raise AttributeError('broken')\n"])
def test_code_of_a_model_that_lacks_its_class_is_one_clear_error(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    configure(model_dir, auto_map={"AutoConfig": "own.OwnConfig"})
    (model_dir / "own.py").write_text(code)
    for read in (load_hf_config, open_config):
        with pytest.raises(InputError, match=r"OwnConfig|no_such_module|broken"):
            read(model_dir, True)


def test_stop_tokens_beyond_the_vocabulary_are_refused(model_dir: Path) -> None:
    with pytest.raises(InputError, match=r"--rollout-stop-token-ids 14: .*vocab_size=14"):
        check_served_model(for_model(model_dir, rollout_stop_token_ids=(1, 14)), "torch", model_dir)


@pytest.mark.parametrize(("field", "kind"), [("rope_parameters", "rope_type"), ("rope_scaling", "type")])
def test_a_context_that_yarn_stretches_may_be_asked_for(tmp_path: Path, field: str, kind: str) -> None:
    rope = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 128, field: rope}))

    def limits(length: int) -> int:
        config = RunConfig.model_validate({"rollout": {"rollout_max_context_len": length}})
        return context_limits(tmp_path, config.rollout, config.data).max_context_len

    assert limits(400) == 400
    with pytest.raises(InputError, match="use at most 400"):
        limits(401)


@pytest.mark.parametrize("link", [True, False])
def test_weights_that_are_a_broken_link_or_a_directory_are_said_to_be(model_dir: Path, link: bool) -> None:
    file = model_dir / "model.safetensors"
    file.unlink()
    if link:
        file.symlink_to("/nowhere/blob")
    else:
        file.mkdir()
    with pytest.raises(InputError, match="is a link to /nowhere/blob" if link else "is a directory"):
        check_trained_model(for_model(model_dir))
