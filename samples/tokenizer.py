"""Loading the tokenizer that prompts and responses are measured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samples.errors import InputError
from samples.model_files import config_for_tokenizer


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The ``transformers`` tokenizer of a model directory. Raises InputError when there is none that loads.

    Without the tokenizer's files ``transformers`` makes one that knows special tokens only; that is none, too.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory,
            config=config_for_tokenizer(directory),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"--hf-checkpoint {directory}: the tokenizer does not load ({error}); the directory needs tokenizer.json "
            "or the model's own tokenizer files (one that is Python code is run only with --trust-remote-code)"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise InputError(
            f"--hf-checkpoint {directory}: the tokenizer has no vocabulary; is tokenizer.json missing? Copy the "
            "tokenizer's files from the model that the weights come from"
        )
    return tokenizer
