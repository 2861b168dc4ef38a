import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'forbidden' %}{{ raise_exception('roles must be known') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(*, adds: str = "", chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character. ``adds``: what its post-processor puts around a text, e.g. "<s> $A"."""
    special = ["<unk>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*special, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=adds, special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=chat_template,
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows, one JSON object a line, and gives the file's path."""

    def write(rows: Iterable[Any], name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
