import io
import os
import pty
import re
import subprocess
import sys

import pytest

from observability.progress import Progress, choose_mode
from observability.timing import StepTimer

METRICS = {
    "rollout/raw_reward": 0.412,
    "rollout/response_len/mean": 3.14,
    "rollout/response_len/max": 8,
    "perf/step_time": 0.34,
    "perf/rollout_time": 0.2,
    "perf/train_time": 0.1,
    "perf/tokens_per_second": 18211.0,
}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_plain_shows_phases_notes_and_steps_as_lines():
    step_line = (
        "step  12/150 | reward 0.412 | length 3.1 | 18.2k tokens/s | "
        "0.34 s: rollout 59%, train 29%, other 12% | 46.9 s left"
    )
    out, clock = io.StringIO(), Clock()
    with Progress("plain", 150, stream=out, clock=clock) as progress:
        progress.phase("starting the rollout worker")
        assert out.getvalue() == "[  0.0 s] starting the rollout worker\n"
        clock.now += 1.25
        progress.phase("loading the model")
        progress.banner({"engine": "torch", "run_dir": 7})
        progress.step(11, METRICS)
    assert out.getvalue().splitlines()[1:] == [
        "[  1.2 s] loading the model",
        "  engine   torch",
        "  run dir  7",
        step_line,
    ]


def test_plain_thins_out_quick_steps_but_shows_first_and_last():
    out, clock = io.StringIO(), Clock()
    progress = Progress("plain", 100, stream=out, clock=clock)
    for step in range(100):
        progress.step(step, METRICS)
        clock.now += 0.1
    shown = [int(number) for number in re.findall(r"step +(\d+)/100", out.getvalue())]
    assert shown[0] == 1
    assert shown[-1] == 100
    assert 5 <= len(shown) <= 8


def test_slow_steps_are_all_shown():
    out, clock = io.StringIO(), Clock()
    progress = Progress("plain", 5, stream=out, clock=clock)
    for step in range(5):
        progress.step(step, METRICS)
        clock.now += 60
    assert len(out.getvalue().splitlines()) == 5


def test_a_step_without_metrics_is_still_a_line():
    out = io.StringIO()
    Progress("plain", 3, stream=out).step(0, {})
    assert out.getvalue() == "step 1/3\n"


def test_off_prints_nothing_and_keeps_the_history():
    out = io.StringIO()
    with Progress("off", 3, stream=out) as progress:
        progress.phase("x")
        progress.note("y")
        progress.step(0, METRICS)
    assert out.getvalue() == ""
    assert progress.history.steps == 1


def test_characters_that_the_stream_cannot_show_are_replaced():
    raw = io.BytesIO()
    progress = Progress("plain", 3, stream=io.TextIOWrapper(raw, encoding="ascii"))
    progress.phase("loading …")
    assert raw.getvalue() == b"[  0.0 s] loading ?\n"


def test_a_reader_that_went_away_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with Progress("plain", 3, stream=Gone()) as progress:
        progress.phase("x")
        progress.step(0, METRICS)
    assert progress.history.steps == 1


def test_auto_is_live_only_in_a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)
    assert choose_mode("auto", Terminal()) == "live"
    assert choose_mode("auto", io.StringIO()) == "plain"
    assert choose_mode("live", io.StringIO()) == "live"
    assert choose_mode("live", io.TextIOWrapper(io.BytesIO(), encoding="ascii")) == "plain"
    monkeypatch.setenv("CI", "true")
    assert choose_mode("auto", Terminal()) == "plain"
    monkeypatch.delenv("CI")
    monkeypatch.setenv("TERM", "dumb")
    assert choose_mode("auto", Terminal()) == "plain"


def test_plain_does_not_import_rich():
    code = "import sys, observability.progress as p; p.Progress('plain', 1).phase('x'); print('rich' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "False"


def test_live_shows_the_run_in_a_real_terminal_and_gives_it_back():
    code = f"""
from observability.progress import Progress
with Progress("auto", 3) as progress:
    progress.phase("starting the rollout worker")
    progress.note("engine: torch")
    for step in range(3):
        progress.step(step, {METRICS!r})
    print("a line of someone else's")
    progress.phase("writing the model")
print("done", progress.mode)
"""
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"} | {"CI": ""}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=writer, env=environment)
    os.close(writer)
    shown = b""
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal so
            break
        if not chunk:
            break
        shown += chunk
    os.close(reader)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for expected in (
        "starting the rollout worker",
        "engine: torch",
        "3/3",
        "0.412",
        "longest 8",
        "18.2k",
        "rollout 59%",
        "a line of someone else's",
        "writing the model",
        "done live",
    ):
        assert expected in text
    assert b"\x1b[?25h" in shown  # the cursor is shown again


def test_live_leaves_the_terminal_when_the_run_fails():
    out = Terminal()

    def fail():
        with Progress("live", 3, stream=out):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert out.getvalue().endswith("\x1b[?25h")


def test_the_timer_adds_up_parts_and_starts_anew():
    clock = Clock()
    timer = StepTimer(clock)
    for _ in range(2):
        with timer.part("rollout"):
            clock.now += 1.0
    timer.add("reward", 0.5)
    clock.now += 2.0
    assert timer.finish(tokens=100) == {
        "perf/step_time": 4.0,
        "perf/rollout_time": 2.0,
        "perf/reward_time": 0.5,
        "perf/tokens_per_second": 25.0,
    }
    clock.now += 1.0
    assert timer.finish(tokens=0) == {"perf/step_time": 1.0, "perf/tokens_per_second": 0.0}
