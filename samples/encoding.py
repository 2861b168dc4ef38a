"""From a prompt to token ids: the one function by which prompts are measured and served."""

from __future__ import annotations

from typing import Any

from samples.errors import InputError
from samples.sample import Message


def encode_prompt(tokenizer: Any, prompt: str | list[Message], *, apply_chat_template: bool = False) -> list[int]:
    """Token ids that the engine is given for ``prompt``.

    ``tokenizer`` is any Hugging Face tokenizer. A message list always goes through its chat template, with the opening
    of the answer added; text does so, as one user message, with ``apply_chat_template``. A rendered template brings
    its own special tokens, so none are added to it. Plain text gets the beginning-of-sequence token that the tokenizer
    itself would add, unless the text spells it already; it never gets an end-of-sequence token, after which no model
    goes on. Raises InputError where there is no template, or the template refuses the messages.
    """
    if isinstance(prompt, str) and not apply_chat_template:
        return _encode_text(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is None:
        raise InputError(
            "the model's tokenizer has no chat template, which a prompt given as messages (or --apply-chat-template) "
            "needs; use a checkpoint with one, or prompts given as text"
        )
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # a template is code of the checkpoint's and raises whatever it likes
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"the model's chat template cannot render these messages: {reason}") from error
    return list(ids)


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    begin = tokenizer.bos_token_id
    if begin is None or ids[:1] == [begin]:
        return ids
    adds_begin = tokenizer.encode("", add_special_tokens=True)[:1] == [begin]
    return [begin, *ids] if adds_begin else ids
