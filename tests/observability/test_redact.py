import pytest

from observability.redact import redact, redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:secret@host:8000/v1", "https://[hidden]@host:8000/v1"),
        ("http://token@host", "http://[hidden]@host"),
        ("http://host/score?api_key=abc&model=x&X-Auth-Token=t", "http://host/score?api_key=[hidden]&model=x&X-Auth-Token=[hidden]"),
        ('rm_url = "https://a:b@h/?sig=c"\nlr = 1', 'rm_url = "https://[hidden]@h/?sig=[hidden]"\nlr = 1'),
        ("http://host/path?page=2", "http://host/path?page=2"),
        ("write to someone@example.org", "write to someone@example.org"),
    ],
)  # fmt: skip
def test_credentials_of_addresses_are_hidden_and_nothing_else(text, expected):
    assert redact(text) == expected


def test_whole_configurations_are_redacted():
    config = {"reward": {"rm_url": "http://u:p@h", "n": 1}, "data": {"prompt_data": ("a.jsonl", "ftp://u:p@h/b")}}
    assert redacted(config) == {
        "reward": {"rm_url": "http://[hidden]@h", "n": 1},
        "data": {"prompt_data": ["a.jsonl", "ftp://[hidden]@h/b"]},
    }
