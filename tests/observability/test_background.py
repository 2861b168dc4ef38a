import threading

from observability.background import BackgroundTracker


class Recorder:
    def __init__(self, fail_at=None, wait=None):
        self.seen, self.closed = [], 0
        self.fail_at, self.wait = fail_at, wait

    def log(self, step, metrics):
        if self.wait is not None:
            self.wait.wait()
        if step == self.fail_at:
            raise ConnectionError("reset by peer\nwith details")
        self.seen.append((step, metrics))

    def close(self):
        self.closed += 1


def test_everything_arrives_in_order_before_close_returns():
    recorder, notes = Recorder(), []
    tracker = BackgroundTracker("service", lambda: recorder, notes.append)
    metrics = {"x": 0}
    for step in range(100):
        metrics["x"] = step
        tracker.log(step, metrics)
    tracker.close()
    tracker.close()
    assert recorder.seen == [(step, {"x": step}) for step in range(100)]
    assert recorder.closed == 1
    assert notes == []


def test_an_error_is_said_once_and_the_run_goes_on():
    recorder, notes = Recorder(fail_at=1), []
    tracker = BackgroundTracker("service", lambda: recorder, notes.append)
    for step in range(4):
        tracker.log(step, {})
    tracker.close()
    assert recorder.seen == [(0, {})]
    assert recorder.closed == 1
    assert notes == ["service: stopped: reset by peer; the run goes on without it, metrics.jsonl has every step"]


def test_a_service_that_cannot_be_opened_is_said():
    def refuse():
        raise OSError("no such project")

    notes = []
    tracker = BackgroundTracker("service", refuse, notes.append)
    tracker.log(0, {})
    tracker.close()
    assert notes == ["service: stopped: no such project; the run goes on without it, metrics.jsonl has every step"]


def test_a_service_that_hangs_holds_up_neither_steps_nor_the_end():
    release, notes = threading.Event(), []
    tracker = BackgroundTracker("service", lambda: Recorder(wait=release), notes.append, close_seconds=0.01)
    for step in range(1000):
        tracker.log(step, {})
    tracker.close()
    release.set()
    assert notes == ["service: not finished after 0.01 s; the run ends without it"]
