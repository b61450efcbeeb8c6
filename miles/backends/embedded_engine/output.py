"""The JSON of one generated sequence."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from miles.backends.embedded_engine.detokenize import trim_stop

if TYPE_CHECKING:
    from miles.backends.embedded_engine.request import Request
    from miles.backends.embedded_engine.scheduler import Event
    from miles.backends.embedded_engine.tokenizer import Tokenizer


def sequence_json(event: Event, text: str, engine_url: str | None = None) -> dict[str, Any]:
    """The answer as of `event`: final, or cumulative while streaming.

    `meta_info.engine_url`, which SGLang does not have, tells who has answered behind a router.
    """
    request, end = event.request, event.num_tokens
    now = time.time()
    ids = request.output_ids[:end]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason if event.finished else None,
        "prompt_tokens": len(request.prompt_ids),
        "weight_version": event.version,
        "num_retractions": request.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": end,
        "cached_tokens": request.cached_tokens,
        "weight_versions": request.version_spans(end),
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": now - request.arrived,
        "response_sent_to_client_ts": now,
        "engine_url": engine_url,
    }
    if request.return_logprob:
        meta["input_token_logprobs"] = _input_logprobs(request)
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(request.output_logprobs[:end], ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = end
    return {"text": text, "output_ids": ids, "meta_info": meta}


def final_text(request: Request, tokenizer: Tokenizer | None) -> str:
    """The text of a finished request, without what stopped it unless no_stop_trim."""
    if tokenizer is None:
        return ""
    params = request.params
    reason = request.finish_reason or {}
    ids, matched = request.output_ids, reason.get("matched")
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = tokenizer.decode(ids, params.skip_special_tokens) if ids else ""
    if isinstance(matched, str) and not params.no_stop_trim:
        return trim_stop(text, matched)
    return text


def _input_logprobs(request: Request) -> list[tuple[float | None, int, None]]:
    scores = request.input_logprobs
    if scores is None:
        return []
    ids = request.prompt_ids[len(request.prompt_ids) - len(scores) :]
    return [(score, token, None) for score, token in zip(scores, ids, strict=True)]
