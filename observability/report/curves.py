"""Which metrics a report draws, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from observability.formats import PARTS
from observability.report.charts import Chart, Line
from observability.report.record import Series

STEP_TIME = "perf/step_time"
SOURCE, REWARD = "rollout/source/", "/raw_reward"
RETURNED = "rollout/async/groups_returned"
EVALUATION, BEFORE_TRAIN = "eval/", "eval_before_train/"
FALLBACK, TRAINED = "rollout/dynamic_filter/groups_by_fallback", "rollout/dynamic_filter/groups_kept"
MAX_EVALUATIONS = 24  # charts
MAX_SOURCES = 8  # curves in one chart that can be told apart


@dataclass(frozen=True)
class Curve:
    """A chart of one or two metrics, drawn where the run has the first; ``band`` names a smallest and a largest."""

    title: str
    about: str
    keys: Mapping[str, str]  # metric -> label
    band: tuple[str, str] | None = None
    percent: bool = False
    log: bool = False


CURVES = (
    Curve("Reward", "mean of all sampled responses, before any filter", {"rollout/raw_reward": "reward"}),
    Curve(
        "Response length",
        "tokens: mean, and from the shortest to the longest",
        {"rollout/response_len/mean": "mean"},
        band=("rollout/response_len/min", "rollout/response_len/max"),
    ),
    Curve(
        "Truncated responses",
        "share that ran into a length limit",
        {"rollout/truncated_ratio": "truncated"},
        percent=True,
    ),
    Curve(
        "Groups without spread",
        "share whose rewards are all equal: nothing to learn from",
        {"rollout/zero_spread_ratio": "no spread"},
        percent=True,
    ),
    Curve(
        "Groups kept by fallback",
        "rejected by the filter and trained on all the same, beside those that were dropped",
        {FALLBACK: "kept by fallback", "rollout/dynamic_filter/groups_dropped": "dropped"},
    ),
    Curve("Loss", "what the optimizer minimises", {"train/loss": "loss"}),
    Curve("Gradient norm", "before clipping", {"train/grad_norm": "norm"}, log=True),
    Curve("Entropy", "of the policy's next-token distribution, in nats", {"train/entropy": "entropy"}),
    Curve("KL divergence", "from the reference model, in nats", {"train/kl": "KL"}, log=True),
    Curve(
        "Rollout against trainer",
        "difference of a token's log-probability: mean and largest",
        {
            "train/train_rollout_logprob_abs_diff": "mean",
            "train/train_rollout_logprob_abs_diff_max": "largest",
        },
        log=True,
    ),
    Curve(
        "Staleness",
        "weight versions between a group's oldest token and the training on it: mean and largest",
        {"rollout/async/staleness/mean": "mean", "rollout/async/staleness/max": "largest"},
    ),
    Curve(
        "Groups in flight and waiting",
        "generated or scored, mean over the step; finished and not trained on, after the step took its own",
        {"rollout/async/in_flight": "in flight", "rollout/async/queue_depth": "waiting"},
    ),
    Curve(
        "Groups that came back",
        "since the start of the run: in all, aborted by the engine, and tried again after an error",
        {
            RETURNED: "returned",
            "rollout/async/groups_aborted": "aborted",
            "rollout/async/groups_retried": "retried",
        },
    ),
    Curve(
        "Engine busy",
        "share of the time with a group in flight",
        {"rollout/async/engine_busy_ratio": "busy"},
        percent=True,
    ),
    Curve("Learning rate", "of the last optimizer step", {"train/lr": "learning rate"}),
    Curve("Speed", "response tokens sampled per second of the step", {"perf/tokens_per_second": "tokens/s"}),
)

_KEYS = frozenset(key for curve in CURVES for key in (*curve.keys, *(curve.band or ()))) | {TRAINED}
_TIMES = frozenset(key for key, _ in PARTS) | {STEP_TIME}


def wanted(key: str) -> bool:
    """Whether any chart draws this metric."""
    if key.startswith(SOURCE):
        return key.endswith(REWARD)
    return key in _KEYS or key in _TIMES or key.startswith((EVALUATION, BEFORE_TRAIN))


def charts(series: Mapping[str, Series]) -> list[Chart]:
    """The charts of a run, in the order in which they are shown."""
    drawn = [_chart(curve, series) for curve in CURVES if _worth_showing(curve, series)]
    after = 1 if CURVES[0].keys.keys() & series.keys() else 0  # what else was learned stands beside the reward
    return [*drawn[:after], *_by_source(series), *_evaluations(series), *drawn[after:], *_time_split(series)]


def _worth_showing(curve: Curve, series: Mapping[str, Series]) -> bool:
    key = next(iter(curve.keys))
    if key not in series:
        return False
    if key in ("train/kl", FALLBACK, RETURNED):  # always 0: it was not computed, or there was none
        return any(value != 0 for value in series[key].values)
    if key == "train/lr":  # always the same: it stands in the configuration
        return len(set(series[key].values)) > 1
    return True


def _chart(curve: Curve, series: Mapping[str, Series]) -> Chart:
    lines = [_line(label, series[key]) for key, label in curve.keys.items() if key in series]
    if curve.band and all(key in series and len(series[key].steps) == len(lines[0].steps) for key in curve.band):
        low, high = (series[key].values for key in curve.band)
        lines[0] = Line(lines[0].label, lines[0].steps, lines[0].values, low, high)
    nonfinite = {step: was for key in curve.keys if key in series for step, was in series[key].nonfinite.items()}
    return Chart(curve.title, curve.about, lines, percent=curve.percent, log=curve.log, nonfinite=nonfinite)


def _line(label: str, series: Series) -> Line:
    return Line(label, series.steps, series.values)


def _by_source(series: Mapping[str, Series]) -> list[Chart]:
    names = sorted(key for key in series if key.startswith(SOURCE))
    if len(names) < 2:
        return []
    shown = sorted(sorted(names, key=lambda key: -len(series[key].steps))[:MAX_SOURCES])
    about = "mean of each source's responses"
    if len(shown) < len(names):
        about += f"; the {len(shown)} most frequent of {len(names)} sources"
    lines = [_line(key.removeprefix(SOURCE).removesuffix(REWARD), series[key]) for key in shown]
    return [Chart("Reward by source", about, lines)]


def _evaluations(series: Mapping[str, Series]) -> list[Chart]:
    """A chart for each evaluation set: its mean reward, and pass@k for k above 1 (pass@1 is the mean, mostly)."""
    charts: dict[str, dict[str, str]] = {}
    for key in sorted(series):
        name, slash, rest = key.removeprefix(EVALUATION).partition("/")
        if key.startswith(EVALUATION) and (not slash or (rest.startswith("pass@") and rest != "pass@1")):
            charts.setdefault(name, {})[key] = rest or "mean reward"
    return [_evaluation(name, keys, series) for name, keys in list(charts.items())[:MAX_EVALUATIONS]]


def _evaluation(name: str, keys: Mapping[str, str], series: Mapping[str, Series]) -> Chart:
    lines, about = [], "after these steps"
    for key, label in keys.items():
        steps, values = list(map(float, series[key].steps)), list(series[key].values)
        before = series.get(BEFORE_TRAIN + key.removeprefix(EVALUATION))
        if before is not None:
            steps, values = [-1.0, *steps], [before.values[0], *values]
            about = "before the first step (drawn as step -1) and after these steps"
        lines.append(Line(label, steps, values))
    nonfinite = {step: was for key in keys for step, was in series[key].nonfinite.items()}
    return Chart(f"Evaluation: {name}", about, lines, nonfinite=nonfinite)


def _time_split(series: Mapping[str, Series]) -> list[Chart]:
    if STEP_TIME not in series:
        return []
    steps, whole = series[STEP_TIME].steps, series[STEP_TIME].values
    parts = {name: _aligned(series[key], steps) for key, name in PARTS if key in series}
    if not parts:
        return []
    spent = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts["other"] = [max(0.0, step - known) for step, known in zip(whole, spent, strict=True)]
    lines = [Line(name, steps, values) for name, values in parts.items()]
    return [Chart("Where the time goes", "seconds of each step", lines, stacked=True)]


def _aligned(series: Series, steps: Sequence[int]) -> list[float]:
    """The values at ``steps``, 0 where there is none (a step that had nothing to train on)."""
    values = dict(zip(series.steps, series.values, strict=True))
    return [values.get(step, 0.0) for step in steps]
