"""A model directory's tokenizer, or what is said when there is none."""

import json

import pytest

from samples import InputError
from samples.tokenizer import load_tokenizer

from .conftest import build_tokenizer


def test_a_directory_without_a_tokenizer_is_refused_by_its_own_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 16}))
    with pytest.raises(InputError, match=rf"--hf-checkpoint {tmp_path}: the tokenizer has no vocabulary"):
        load_tokenizer(tmp_path)


def test_a_directory_with_a_tokenizer_gives_it(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("a") == build_tokenizer().encode("a")
