"""A request in SGLang's words, and its answer in ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rollout.engines.errors import EngineError
from rollout.engines.protocol import FinishReason, GenerateRequest, GenerateResult
from samples.errors import InputError

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_ROUNDING = 1e-3  # by which a log-probability may be above zero
_SEED_BITS = 31  # SGLang's seeds are signed


def needs_kept_ids(request: GenerateRequest) -> bool:
    """Whether training needs to know which tokens top-p and top-k left."""
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def limit_of(request: GenerateRequest, max_context_len: int) -> int:
    """New tokens that there is room for. InputError when there is none, and for ids that no text can have."""
    room = min(request.sampling.max_new_tokens, max_context_len - len(request.input_ids))
    if not request.input_ids:
        raise InputError(f"request {request.request_id}: the prompt is empty")
    if room < 1:
        raise InputError(
            f"request {request.request_id}: a prompt of {len(request.input_ids)} tokens leaves no room in a context of "
            f"{max_context_len}"
        )
    return room


def check_tokens(request: GenerateRequest, vocab_size: int) -> None:
    """An id outside the vocabulary would end the server: it looks the embedding up unchecked."""
    for token in request.input_ids:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"request {request.request_id}: token id {token} is outside the vocabulary of {vocab_size}: the "
                "tokenizer does not belong to the model"
            )


def request_body(request: GenerateRequest, request_id: str, limit: int, mask_tokens: int) -> dict[str, Any]:
    """The body of ``/generate``. ``mask_tokens``: the most that top-k may leave where their ids are asked for."""
    given = request.sampling
    sampling: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": given.temperature,
        "skip_special_tokens": False,  # stop strings may be special tokens; the text is made here
        "no_stop_trim": True,
        "ignore_eos": given.ignore_eos,
        "sampling_seed": sampling_seed(request),
    }
    if given.top_p < 1:
        sampling["top_p"] = given.top_p
    if given.top_k > 0:
        sampling["top_k"] = given.top_k
    if given.min_new_tokens:
        sampling["min_new_tokens"] = min(given.min_new_tokens, limit)
    if given.stop:
        sampling["stop"] = list(given.stop)
    if given.stop_token_ids:
        sampling["stop_token_ids"] = list(given.stop_token_ids)
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": list(request.input_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if needs_kept_ids(request):
        sampling["top_k"] = min(given.top_k, mask_tokens) if given.top_k > 0 else mask_tokens
        body["return_sampling_mask"] = True
    return body


def sampling_seed(request: GenerateRequest) -> int:
    """Of seed, rollout and sample alone; servers with ``enable_deterministic_inference`` add the token's position."""
    mixed = 0x9E3779B97F4A7C15
    for part in (request.seed, request.rollout_id, request.sample_index):
        mixed = ((mixed ^ (part & (2**64 - 1))) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed ^= mixed >> 29
    return mixed >> (64 - _SEED_BITS)


def read_answer(
    request: GenerateRequest, answer: Any, version_of: Callable[[str], int], text_of: Callable[[Sequence[int]], str]
) -> GenerateResult:
    """``version_of`` reads a server's weight version. EngineError for an answer that lacks what was asked for."""
    try:
        ids: list[int] = answer["output_ids"]
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"] or []
        reason = _FINISH[(meta["finish_reason"] or {"type": "abort"})["type"]]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
        stretches = [(version_of(str(span["version"])), int(span["end"]) - int(span["start"])) for span in spans]
        kept = meta["output_token_sampling_mask"] if needs_kept_ids(request) else None
        log_probs, tokens = [float(pair[0]) for pair in pairs], [int(pair[1]) for pair in pairs]
    except (KeyError, TypeError) as error:
        raise EngineError(f"request {request.request_id}: the server's answer has no {error}") from error
    except (ValueError, IndexError) as error:
        raise EngineError(f"request {request.request_id}: the server's answer is not as SGLang's: {error}") from error
    wrong = [value for value in log_probs if not -math.inf < value <= _ROUNDING]
    if wrong:
        raise EngineError(f"request {request.request_id}: the server answered {wrong[0]} for a log-probability")
    if not stretches or sum(tokens for _, tokens in stretches) != len(ids):
        raise EngineError(
            f"request {request.request_id}: the server answered {len(ids)} tokens and weight versions of "
            f"{sum(tokens for _, tokens in stretches)}"
        )
    if tokens != ids or (kept is not None and len(kept) != len(ids)):
        raise EngineError(
            f"request {request.request_id}: the server answered {len(ids)} tokens with {len(pairs)} log-probabilities"
            + ("" if kept is None else f" and {len(kept)} sets of kept tokens")
        )
    return GenerateResult(
        request_id=request.request_id,
        output_ids=ids,
        log_probs=log_probs,
        finish_reason=reason,
        text=text_of(ids),
        weight_version=stretches[0][0],
        kept_token_ids=kept,
        weight_spans=tuple((version, tokens) for version, tokens in stretches if tokens),
    )
