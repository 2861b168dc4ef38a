import json
import math
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.__main__ import main
from observability.report import write_report
from observability.report.axes import limits, log_ticks, number, tick_texts, ticks
from observability.report.charts import COLUMNS, Chart, Line, merge, smooth, svg
from observability.report.page import spread
from observability.trackers import JsonlTracker
from samples.errors import InputError

VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = "</pre></main><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31m \u202e \ud800 &lt; \"' \x00"


class Page(HTMLParser):
    """Elements, texts by element, and a check that tags close in the order in which they open."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts, self.open = [], [], {}, []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def text(self, tag):
        return "".join(self.texts.get(tag, []))


def step_metrics(step):
    return {
        "rollout/raw_reward": step / 40,
        "rollout/response_len/mean": 10.0,
        "rollout/response_len/min": 1,
        "rollout/response_len/max": 20,
        "rollout/truncated_ratio": 0.25,
        "train/loss": -0.1,
        "train/grad_norm": 1.5,
        "train/entropy": 2.0,
        "train/kl": 0.001,
        "train/train_rollout_logprob_abs_diff": 1e-6,
        "perf/step_time": 2.0,
        "perf/rollout_time": 1.0,
        "perf/train_time": 0.5,
    }


def make_run(run_dir, steps=40, facts=(), extra=lambda step: {}, samples=()):
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    for step in range(steps):
        tracker.log(step, step_metrics(step) | extra(step))
    tracker.close()
    table = "".join(f"{name} = {json.dumps(value)}\n" for name, value in dict(facts).items())
    (run_dir / "config.toml").write_text(f"[job]\nnum_rollout = 40\n[run]\n{table}", encoding="utf-8")
    if samples:
        (run_dir / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return run_dir


def transcript(step, text, rank="best"):
    return {
        "step": step, "rank": rank, "reward": 1.0, "status": text, "response_length": 3, "index": 4, "source": text,
        "prompt": [{"role": text, "content": text}], "response": text, "label": text,
    }  # fmt: skip


def written(run_dir, **options):
    return write_report(run_dir, **options).read_text(encoding="utf-8")


def titles(page):
    return page.texts["h3"]


def test_the_page_has_the_curves_the_facts_and_the_transcripts(tmp_path):
    facts = {"accelerator": "cpu", "emulated": False, "torch": "2.13"}
    html = written(make_run(tmp_path, facts=facts, samples=[transcript(0, "seventeen")]))
    page = Page(html)
    assert titles(page) == [
        "Reward", "Response length", "Truncated responses", "Loss", "Gradient norm", "Entropy", "KL divergence",
        "Rollout against trainer", "Where the time goes",
    ]  # fmt: skip
    assert page.tags.count("svg") == len(titles(page))
    assert "Mean reward rose to" in page.text("p")
    assert "2.13" in page.text("td")
    assert "seventeen" in page.text("pre")
    assert "Emulated" not in html


def test_the_page_needs_and_fetches_nothing_and_links_beside_itself(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    page = Page(written(make_run(tmp_path, samples=[transcript(0, "x")])))
    assert not {"script", "img", "link", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on") or attribute[1] == "src"]
    links = [value for tag, name, value in page.attributes if name == "href"]
    assert links == ["metrics.jsonl", "samples.jsonl", "config.toml", "tensorboard/"]
    assert any("default-src 'none'" in str(value) for _, _, value in page.attributes)


def test_what_the_model_and_the_files_say_is_shown_and_never_interpreted(tmp_path):
    facts = {"note": "<script>1</script>", "rm": "https://me:pw@host/?api_key=abc"}
    run_dir = make_run(
        tmp_path, facts=facts, samples=[transcript(0, HOSTILE)], extra=lambda step: {"eval/<b>set": 0.5, "eval/a&b": 1}
    )
    html = written(run_dir, outcome="stopped by an error: RuntimeError: <script>2</script> http://u:pw@h")
    page = Page(html)
    assert not {"script", "img", "b>set"} & set(page.tags)
    assert "pw@" not in html
    assert "abc" not in html
    shown = page.text("pre")
    assert "</pre></main><script>alert(1)</script><img src=x onerror=alert(2)>" in shown
    for raw in ("\x1b", "\u202e", "\x00"):
        assert raw not in html
    assert {"\\x1b", "\\u202e", "\\ud800", "\\x00"} <= set(page.texts["span"])
    assert "Evaluation: <b>set" in titles(page)


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=()), max_size=60))
def test_no_text_of_a_model_changes_the_page(tmp_path_factory, text):
    run_dir = make_run(tmp_path_factory.mktemp("run"), steps=1, samples=[transcript(0, text)])
    plain = Page(written(make_run(tmp_path_factory.mktemp("plain"), steps=1, samples=[transcript(0, "x")])))
    codes = ("span",)  # of characters without a glyph
    assert [t for t in Page(written(run_dir)).tags if t not in codes] == [t for t in plain.tags if t not in codes]


def test_an_emulated_run_says_so_at_the_top(tmp_path):
    page = Page(written(make_run(tmp_path, facts={"accelerator": "musa", "emulated": True})))
    assert "Emulated accelerator" in page.text("p")
    assert "musa, emulated" in page.text("b")


def test_how_the_run_ended_and_how_far_it_came(tmp_path):
    page = Page(written(make_run(tmp_path, steps=12), outcome="interrupted"))
    assert "This run was interrupted." in page.text("p")
    assert "12 of 40" in page.text("b")


def test_a_value_that_is_not_finite_is_marked_and_named(tmp_path):
    page = Page(written(make_run(tmp_path, extra=lambda step: {"train/loss": math.nan} if step == 7 else {})))
    assert any("not finite in 1 step, first nan in step 7" in text for text in page.texts["span"])
    assert "step 7: nan" in page.texts["title"]


def test_evaluations_have_their_curve_with_the_weights_before_training(tmp_path):
    def extra(step):
        before = {"eval_before_train/gsm8k": 0.125, "eval_before_train/gsm8k/num_prompts": 8}
        after = {
            "eval/gsm8k": step / 40,
            "eval/gsm8k/pass@1": 0.1,
            "eval/gsm8k/pass@8": 0.5,
            "eval/gsm8k/num_prompts": 8,
        }
        return (before if step == 0 else {}) | (after if step % 10 == 9 else {})

    page = Page(written(make_run(tmp_path, extra=extra)))
    assert titles(page)[1] == "Evaluation: gsm8k"
    assert "step -1: mean reward 0.125" in page.texts["title"]
    assert "step 9: mean reward 0.225, pass@8 0.5" in page.texts["title"]


def test_groups_that_a_fallback_kept_are_said_and_drawn_and_none_is_not(tmp_path):
    def counts(step):
        by_fallback = 3 if step % 2 else 0
        names = {"groups_by_fallback": by_fallback, "groups_kept": 8, "groups_dropped": 0}
        return {f"rollout/dynamic_filter/{name}": value for name, value in names.items()}

    page = written(make_run(tmp_path / "some", steps=10, extra=counts))
    assert "15 of the 80 groups that were trained on had been rejected by the filter" in page
    assert "Groups kept by fallback" in titles(Page(page))
    page = written(make_run(tmp_path / "none", steps=10, extra=lambda step: counts(0)))
    assert "fallback" not in page


def test_what_overlapped_rollouts_did_is_drawn_where_there_were_any(tmp_path):
    def overlapped(returned):
        values = {
            "staleness/mean": 0.5,
            "staleness/max": 1,
            "in_flight": 40,
            "queue_depth": 3,
            "engine_busy_ratio": 0.9,
        }
        values |= {"groups_returned": returned, "groups_aborted": returned, "groups_retried": 0}
        return {f"rollout/async/{name}": value for name, value in values.items()}

    shown = titles(Page(written(make_run(tmp_path / "some", steps=10, extra=overlapped))))
    drawn = ("Staleness", "Groups in flight and waiting", "Groups that came back", "Engine busy")
    assert all(title in shown for title in drawn)
    shown = titles(Page(written(make_run(tmp_path / "calm", steps=10, extra=lambda step: overlapped(0)))))
    assert "Groups that came back" not in shown
    shown = titles(Page(written(make_run(tmp_path / "turn", steps=10))))
    assert not any(title in shown for title in drawn)


def test_sources_share_a_chart_when_there_are_several(tmp_path):
    def extra(step):
        return {f"rollout/source/{name}/raw_reward": 0.5 for name in (["a", "b"] if step % 2 else ["a"])}

    assert "Reward by source" in titles(Page(written(make_run(tmp_path, extra=extra))))


def test_a_run_that_went_on_from_a_checkpoint_counts_its_steps_once(tmp_path):
    make_run(tmp_path, steps=10)
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(6, 12):
        tracker.log(step, step_metrics(step) | {"rollout/raw_reward": 9.0})
    tracker.close()
    page = Page(written(tmp_path))
    assert "12 of 40" in page.text("b")
    assert "step 7: reward 9" in page.texts["title"]
    assert "step 7: reward 0.175" not in page.texts["title"]


def test_a_run_without_configuration_samples_or_rewards_still_has_a_report(tmp_path):
    JsonlTracker(tmp_path / "metrics.jsonl").log(0, {"perf/step_time": 1.0, "train/loss": math.nan})
    page = Page(written(tmp_path))
    assert "No rewards" in page.text("p")
    assert "no finite value" in page.text("text")


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    make_run(tmp_path, steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rollout/raw')
    assert "3 of 40" in Page(written(tmp_path)).text("b")


def test_the_command_writes_it_anew_and_refuses_other_directories(tmp_path, capsys):
    assert main(["report", str(make_run(tmp_path))]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("[")
    assert main(["report", str(tmp_path)]) == 2
    (tmp_path / "config.toml").unlink()
    (tmp_path / "metrics.jsonl").write_text("{}x\n")
    with pytest.raises(InputError, match="line 1"):
        write_report(tmp_path)


# charts


JUNK = {
    "metrics.jsonl": [
        "[1]",
        '{"a": 1}',
        '{"step": 9, "train/loss": "<b>"}',
        '{"step": 9, "nonfinite": [1]}',
        "[" * 100_000,
    ],
    "samples.jsonl": ["x", '{"a": 1}', '{"step": 1, "prompt": [1]}', '{"step": 1, "response": 5}', "[" * 100_000],
    "config.toml": ["\xff = \xff", 'run = "x"', 'job = "x"'],
}


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in JUNK.items() for text in texts])
def test_files_that_no_run_wrote_are_refused_by_name(tmp_path, file, text):
    make_run(tmp_path, steps=2)
    path = tmp_path / file
    kept = "" if file == "config.toml" or not path.exists() else path.read_text()
    path.write_bytes(kept.encode() + text.encode("latin-1") + b"\n")
    with pytest.raises(InputError, match=file):
        write_report(tmp_path)


def line(values, **band):
    return Line("x", list(range(len(values))), values, **band)


def test_many_points_become_means_with_a_band_that_hides_no_extreme():
    values = [0.0] * 5000
    values[1234] = 100.0
    merged = merge(line(values))
    assert len(merged.steps) <= COLUMNS
    assert max(merged.high) == 100.0
    assert sum(merged.values) * math.ceil(5000 / COLUMNS) == pytest.approx(100.0)


finite_or_not = st.floats(allow_infinity=False) | st.floats(0, 2) | st.just(math.nan)


@settings(deadline=None)
@given(st.lists(finite_or_not, min_size=1, max_size=400), st.booleans(), st.booleans())
def test_any_values_make_a_drawing_whose_places_are_inside_it(values, percent, log):
    root = ElementTree.fromstring(svg(Chart("t", "a", [line(values)], percent=percent, log=log)))
    for path in root.iter("path"):
        places = path.get("d").replace("h.01", "").translate(str.maketrans("MLHVZ", "     ")).split()
        assert all(-1 <= float(place) <= 481 for place in places)


def test_smoothing_keeps_gaps_and_flat_curves():
    assert smooth([2.0] * 50) == pytest.approx([2.0] * 50)
    assert math.isnan(smooth([1.0, math.nan, 1.0])[1])


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_inside_and_told_apart(low, size):
    high = low + size
    if high <= low or size < abs(low) * 1e-6:
        return
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 11
    assert all(low - size * 1e-6 <= mark <= high + size * 1e-6 for mark in marks)


def test_numbers_are_short_and_ticks_share_a_unit():
    assert [number(v) for v in (0, 0.5, -3e-7, 1234, 18_240, -2.5e6)] == [
        "0",
        "0.5",
        "-3e-07",
        "1234",
        "18.2k",
        "-2.5M",
    ]
    assert tick_texts([123_500.0, 123_550.0, 123_600.0]) == ["123.50k", "123.55k", "123.60k"]
    assert tick_texts([0.0, 0.5, 1.0]) == ["0", "0.5", "1.0"]
    assert log_ticks(0.05, 2e3) == [0.1, 1.0, 10.0, 100.0, 1000.0]


def test_axes_are_logarithmic_only_where_asked_and_needed():
    assert limits([1e-6, 1.0], log=True)[2]
    assert not limits([1e-6, 1.0])[2]
    assert not limits([0.0, 1.0], log=True)[2]
    assert not limits([0.5, 1.0], log=True)[2]


def test_shown_steps_are_spread_from_first_to_last():
    assert spread([3, 4], 12) == [3, 4]
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]
