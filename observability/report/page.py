"""The page: what was learned, curves, transcripts, facts. One file, no scripts, nothing fetched."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from observability.formats import compact, duration
from observability.history import learned
from observability.redact import redact
from observability.report.axes import number
from observability.report.charts import Chart, svg
from observability.report.curves import FALLBACK, TRAINED, charts, wanted
from observability.report.record import RunRecord, read_run
from observability.report.style import CSS
from observability.report.text import shown
from observability.transcripts import Transcript

REPORT = "report.html"
SHOWN_STEPS = 12  # with transcripts; the others are in samples.jsonl

CURVES_NOTE = (
    "Over the training steps, which count from 0 as in metrics.jsonl. A thin line is what was measured, the thick one "
    "a moving mean of it. Point at a curve for its values."
)
TRANSCRIPTS_NOTE = (
    "The best and worst responses by reward, from different prompts where there are enough. Characters that have no "
    "glyph are shown as codes."
)
EMULATED = (
    "Emulated accelerator: the device was emulated in this machine's main memory. The values are those of the "
    "emulation, and its times and speeds say nothing about the hardware that it stands for."
)


def write_report(run_dir: str | Path, *, outcome: str | None = None) -> Path:
    """Write ``report.html`` into a run's directory from what lies there; returns its path.

    ``outcome`` says how the run ended, when not by itself ("interrupted", "stopped by an error: ..."). The file appears
    whole or not at all. Raises InputError when ``run_dir`` is no run's.
    """
    run_dir = Path(run_dir)
    page = render(read_run(run_dir, wanted), outcome)
    path = run_dir / REPORT
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(page.encode("utf-8", "replace"))
    os.replace(unfinished, path)
    return path


def render(record: RunRecord, outcome: str | None = None) -> str:
    """The page as HTML. Everything that comes from the run is escaped."""
    title = escape(record.name)
    emulated = bool(record.facts.get("emulated"))
    notes = [_note(EMULATED)] if emulated else []
    if (fallback := _kept_by_fallback(record)) is not None:
        notes.append(_note(fallback))
    if outcome:
        notes.append(_note(f"This run was {outcome}."))
    body = [
        f"<h1>{title}</h1>",
        f"<p>{escape(learned(record.history))}.</p>",
        *notes,
        _tiles(record, emulated),
        "<h2>Curves</h2>",
        f'<p class="soft small">{CURVES_NOTE}</p>',
        f'<div class="grid">{"".join(map(_chart, charts(record.series)))}</div>',
        _transcripts(record.transcripts),
        _facts(record),
    ]
    # The policy forbids everything that is not in the file, should anything ever get past the escaping.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _note(text: str) -> str:
    return f'<p class="note">{shown(redact(text))}</p>'


def _kept_by_fallback(record: RunRecord) -> str | None:
    """What the fallback of a filter did to the data, where it did anything."""
    kept, trained = (
        sum(value for value in record.series[key].values if math.isfinite(value)) if key in record.series else 0.0
        for key in (FALLBACK, TRAINED)
    )
    if not kept:
        return None
    return (
        f"{kept:.0f} of the {trained:.0f} groups that were trained on had been rejected by the filter and were kept by "
        "a fallback, because too few passed. They change the distribution of the data."
    )


def _tiles(record: RunRecord, emulated: bool) -> str:
    planned = record.planned_steps
    done = len(record.steps)
    tiles = [(f"{done} of {planned}" if planned and planned > done else str(done), "steps")]
    reward = record.latest("rollout/raw_reward")
    if reward is not None:
        tiles.append((number(round(reward, 4)), "mean reward of the last step"))
    length = record.latest("rollout/response_len/mean")
    if length is not None:
        tiles.append((number(round(length, 1)), "tokens in a response, mean of the last step"))
    tiles.append((duration(record.history.seconds), "spent in steps"))
    speed = record.latest("perf/tokens_per_second")
    if speed is not None:
        tiles.append((compact(speed), "tokens per second, last step"))
    if "accelerator" in record.facts:
        name = str(record.facts["accelerator"])
        tiles.append((f"{name}, emulated" if emulated else name, "accelerator"))
    cells = (f'<div class="card tile"><b>{escape(value)}</b><span class="soft small">{what}</span></div>'
             for value, what in tiles)  # fmt: skip
    return f'<div class="tiles">{"".join(cells)}</div>'


def _chart(chart: Chart) -> str:
    legend = []
    for place, line in enumerate(chart.lines):
        finite = [value for value in line.values if math.isfinite(value)]
        last = "" if not finite else f" {finite[-1]:.1%}" if chart.percent else f" {number(float(f'{finite[-1]:.4g}'))}"
        legend.append(f'<div class="c{place % 8}"><i></i><span>{escape(line.label)}{last}</span></div>')
    if chart.nonfinite:
        step, was = next(iter(chart.nonfinite.items()))
        count = "1 step" if len(chart.nonfinite) == 1 else f"{len(chart.nonfinite)} steps"
        legend.append(f'<span class="bad-word">not finite in {count}, first {escape(was)} in step {step}</span>')
    return (
        f'<section class="card"><h3>{escape(chart.title)}</h3><p class="soft small">{escape(chart.about)}</p>'
        f'{svg(chart)}<div class="legend small">{"".join(legend)}</div></section>'
    )


def _transcripts(steps: Mapping[int, Sequence[Transcript]]) -> str:
    if not steps:
        return ""
    chosen = spread(sorted(steps), SHOWN_STEPS)
    parts = [
        f"<details{' open' if step in (chosen[0], chosen[-1]) else ''}><summary>Step {step}</summary>"
        f'<div class="samples">{"".join(map(_transcript, steps[step]))}</div></details>'
        for step in chosen
    ]
    return f'<h2>Transcripts</h2><p class="soft small">{TRANSCRIPTS_NOTE}</p>{"".join(parts)}'


def spread(steps: Sequence[int], count: int) -> list[int]:
    """``count`` of ``steps`` at most, from first to last as evenly as they allow."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _transcript(transcript: Transcript) -> str:
    rank = "best" if transcript.get("rank") == "best" else "worst"
    reward = transcript.get("reward")
    tags = [f'<span class="tag {rank}">{rank}</span>', _tag("reward", _reward(reward))]
    tags += [_tag("tokens", transcript.get("response_length")), _tag("", transcript.get("status"))]
    tags += [_tag("source", transcript.get("source")), _tag("sample", transcript.get("index"))]
    prompt = transcript.get("prompt", "")
    if isinstance(prompt, str):
        parts = [("Prompt", prompt)]
    else:
        parts = [(f"Prompt: {message['role']}", message["content"]) for message in prompt]
    parts.append(("Response", transcript.get("response", "")))
    if transcript.get("label") is not None:
        parts.append(("Label", transcript["label"]))
    blocks = "".join(f'<div class="what">{shown(what)}</div><pre>{shown(text)}</pre>' for what, text in parts)
    return f'<article class="card">{"".join(tags)}{blocks}</article>'


def _reward(value: object) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


def _tag(name: str, value: object) -> str:
    return "" if value is None else f'<span class="tag">{name} {shown(str(value))}</span>'


def _facts(record: RunRecord) -> str:
    rows = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{shown(redact(_said(value)))}</td></tr>"
        for name, value in record.facts.items()
    )
    files = "".join(
        f'<li><a href="{quote(name)}{"/" if "." not in name else ""}">{escape(name)}</a> '
        f'<span class="soft">{escape(what)}</span></li>'
        for name, what in record.files.items()
    )
    parts = [f'<h2>The run</h2><div class="card"><table>{rows}</table></div>'] if rows else []
    if files:
        parts.append(
            f"<h2>Files</h2><p class='soft small'>Beside this page, in the run's directory.</p><ul>{files}</ul>"
        )
    if record.config_text:
        text = shown(redact(record.config_text))
        parts.append(f'<details class="config"><summary>The whole configuration</summary><pre>{text}</pre></details>')
    return "".join(parts)


def _said(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
