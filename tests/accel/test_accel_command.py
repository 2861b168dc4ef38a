"""``python -m accel``: what is given wrongly ends with status 2 and a line that says what would be right."""

import os
import subprocess
import sys

import pytest

from accel.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: COMMAND"),
        (["lists"], "invalid choice: 'lists'"),
        (["list", "--josn"], "unrecognized arguments: --josn"),
        (["doctor", "cpu"], "unrecognized arguments: cpu"),
        (["doctor", "--acc", "cpu"], "unrecognized arguments: --acc cpu"),
        (["conformance", "--world", "2"], "unrecognized arguments: --world 2"),
        (["conformance", "--world-size", "0"], "0: give the number of ranks, 1 to 64"),
        (["conformance", "--world-size=-3"], "-3: give the number of ranks"),
        (["conformance", "--world-size", "two"], "two: give the number of ranks"),
        (["conformance", "--world-size", "100000"], "100000: give the number of ranks"),
        (["conformance", "--subject", "nonsense"], "no subject is named 'nonsense': choose among capabilities, "),
        (["emulation", "run"], "invalid choice: 'run'"),
    ],
)
def test_wrong_arguments(capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_an_unusable_accelerator_is_status_1(capsys):
    assert main(["conformance", "--accelerator", "nope"]) == 1
    assert "no accelerator is named 'nope'; known: cpu, cuda, musa" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["list"], ["doctor", "--json", "--accelerator", "cpu"]], ids=" ".join)
def test_a_reader_that_went_away_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "accel", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
