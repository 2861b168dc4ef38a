import pytest

from samples import InputError
from samples.encoding import encode_prompt

from .conftest import build_tokenizer


def test_text_is_encoded_as_it_stands(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, "ab c")).replace(" ", "") == "abc"
    assert len(encode_prompt(tokenizer, "ab c")) == 4


def test_messages_always_go_through_the_chat_template_with_the_answer_opened(tokenizer):
    expected = tokenizer.encode("<user>hi</s><assistant>", add_special_tokens=False)
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi"}]) == expected
    assert encode_prompt(tokenizer, "hi", apply_chat_template=True) == expected


def test_the_template_is_not_given_special_tokens_a_second_time():
    adding = build_tokenizer(adds="<s> $A")
    ids = encode_prompt(adding, [{"role": "user", "content": "hi"}])
    assert ids[0] != adding.bos_token_id


def test_text_gets_the_begin_token_that_the_tokenizer_adds_but_never_an_end_token():
    adding = build_tokenizer(adds="<s> $A </s>")
    ids = encode_prompt(adding, "hi")
    assert ids[0] == adding.bos_token_id
    assert adding.eos_token_id not in ids
    assert len(ids) == 3


def test_text_that_spells_the_begin_token_does_not_get_it_twice():
    adding = build_tokenizer(adds="<s> $A")
    assert encode_prompt(adding, "<s>hi").count(adding.bos_token_id) == 1


def test_a_tokenizer_without_chat_template_is_refused_by_name():
    plain = build_tokenizer(chat_template=None)
    with pytest.raises(InputError, match=r"no chat template.*--apply-chat-template"):
        encode_prompt(plain, [{"role": "user", "content": "hi"}])


def test_what_the_template_refuses_is_said_in_its_own_words(tokenizer):
    with pytest.raises(InputError, match="roles must be known"):
        encode_prompt(tokenizer, [{"role": "forbidden", "content": "hi"}])
