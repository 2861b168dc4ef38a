"""The program of a scoring process: reads one JSON request a line, answers with one JSON line.

Run by path, not imported: ``python -P scorer_worker.py math|reasoning_gym CPU_SECONDS MEMORY_BYTES``. It must not
import anything of ours, so that it starts as fast as the scorer's own package does.

The parsers of math-verify and of many reasoning-gym tasks evaluate what the model wrote (SymPy's ``parse_expr``):
``9**9**9`` keeps one busy inside a single C call, which no thread, no signal handler and no event loop can end. Here
the kernel does: a CPU-time limit per request whose signal ends the process, and a limit on memory.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

Scorer = Callable[[dict[str, Any]], dict[str, Any]]


def math_scorer() -> Scorer:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; ours is on
    # A boxed answer counts before any other expression in the text.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    @functools.lru_cache(maxsize=4096)
    def gold(label: str) -> list[Any]:
        marked = label if re.search(r"\$|\\\(|\\\[|\\boxed", label) else f"${label}$"
        return parse(marked, targets, parsing_timeout=None)

    def score(request: dict[str, Any]) -> dict[str, Any]:
        expected = gold(request["label"])
        if not expected:
            return {"unusable": "no mathematical expression can be read from the label"}
        answer = parse(request["response"], targets, parsing_timeout=None)
        return {"score": float(verify(expected, answer, timeout_seconds=None))}

    return score


TUPLE_FIELDS = {"arc_agi": "output", "rearc": "output"}  # metadata that a scorer compares with tuples, which JSON lacks


def reasoning_gym_scorer() -> Scorer:
    from reasoning_gym import get_score_answer_fn

    scorer_of = functools.cache(get_score_answer_fn)

    def score(request: dict[str, Any]) -> dict[str, Any]:
        score_answer, entry = scorer_of(request["task"]), request["entry"]
        grid = TUPLE_FIELDS.get(request["task"])
        if grid in entry["metadata"]:
            entry["metadata"][grid] = tuple(tuple(row) for row in entry["metadata"][grid])
        try:
            return {"score": float(score_answer(answer=request["response"], entry=entry))}
        except Exception as error:  # noqa: BLE001 - either the answer's fault or the entry's: told apart below
            try:
                score_answer(answer=entry.get("answer"), entry=entry)
            except Exception as own:  # noqa: BLE001 - its own answer cannot be scored either: told to the caller
                return {"unusable": f"its scorer raises {type(own).__name__}: {own}"}
            return {"score": 0.0, "raised": f"{type(error).__name__}: {error}"[:500]}

    return score


def serve(score: Scorer, cpu_seconds: float) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a scorer prints must not be taken for an answer
    _send(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            answer = score(request)
        except (MemoryError, RecursionError) as error:
            answer = {"score": 0.0, "raised": type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, answer)


def _send(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def main() -> None:
    kind, cpu_seconds, memory_bytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it closes our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default ends the process, also inside a C call
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere a limit on address space is refused or ignored
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    serve({"math": math_scorer, "reasoning_gym": reasoning_gym_scorer}[kind](), cpu_seconds)


if __name__ == "__main__":
    main()
