"""The JSON body of /generate, parsed into the sequences to generate."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.backends.embedded_engine.detokenize import IncrementalText
from miles.backends.embedded_engine.errors import MalformedBody, RequestError
from miles.backends.embedded_engine.random_numbers import seed_state
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.backends.embedded_engine.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 128
MAX_SEQUENCES = 4096

UNSUPPORTED_FIELDS = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "return_hidden_states",
    "return_routed_experts",
    "return_entropy",
    "lora_path",
)
"""SGLang's fields that change the answer and that this engine does not have: refused unless null, false, 0 or empty."""


@dataclass(frozen=True)
class ModelLimits:
    """What a prompt is checked against."""

    vocab_size: int
    context_length: int
    """Prompt plus output, in tokens."""
    end_ids: frozenset[int]
    """The ids that end an answer unless ignore_eos."""


@dataclass(frozen=True)
class GenerateBody:
    """A checked /generate body."""

    requests: list[Request]
    """One for each sequence: prompt by prompt, the n copies of one beside each other."""
    rids: frozenset[str]
    """The ids that the client gave, under which the requests can be aborted."""
    is_list: bool
    """Whether the answer is a list (a batch, or n > 1)."""
    stream: bool


def parse_generate_body(
    body: Any, limits: ModelLimits, tokenizer: Tokenizer | None, next_seed: Callable[[], int]
) -> GenerateBody:
    """Check `body` and make its requests; `next_seed` gives a seed to those that bring none.

    Raises a RequestError that says what is wrong.
    """
    if not isinstance(body, dict):
        raise MalformedBody("The request body must be a JSON object.")
    for name in UNSUPPORTED_FIELDS:
        if body.get(name):
            raise RequestError(f"{name} is not supported by the embedded engine.")
    prompts, is_batch = _prompts(body, limits, tokenizer)
    params = _params(body.get("sampling_params"), len(prompts), is_batch)
    total = sum(p.n for p in params)
    if total > MAX_SEQUENCES:
        raise RequestError(f"At most {MAX_SEQUENCES} sequences may be asked for at once, got {total}.")
    stream = _flag(body, "stream")
    return_logprob = _per_prompt(body, "return_logprob", len(prompts), bool, False)
    logprob_start = _per_prompt(body, "logprob_start_len", len(prompts), int, -1)
    given, rids = _rids(body.get("rid"), len(prompts), [p.n for p in params])
    requests: list[Request] = []
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        for copy in range(one.n):
            seed = next_seed() if one.sampling_seed is None else one.sampling_seed + copy
            requests.append(
                Request(
                    rids[len(requests)],
                    prompt,
                    one,
                    max_new_tokens=_max_new_tokens(one, len(prompt), limits.context_length),
                    end_ids=one.stop_token_ids if one.ignore_eos else one.stop_token_ids | limits.end_ids,
                    seed_state=seed_state(seed),
                    return_logprob=return_logprob[i],
                    input_logprobs_from=_input_logprobs_from(return_logprob[i], logprob_start[i], len(prompt)),
                    stream=stream,
                    stop_text=_stop_text(one, tokenizer),
                    index=len(requests),
                )
            )
    return GenerateBody(requests, given, is_batch or any(p.n > 1 for p in params), stream)


def _prompts(body: dict[str, Any], limits: ModelLimits, tokenizer: Tokenizer | None) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise RequestError("Either text, input_ids or input_embeds should be provided.")
    if ids is not None and text is not None:
        raise RequestError("Only one of text and input_ids should be provided.")
    if ids is not None:
        is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        prompts = ids if is_batch else [ids]
    elif isinstance(text, list):
        is_batch = True
        prompts = [_encode(item, tokenizer) for item in text]
    else:
        is_batch = False
        prompts = [_encode(text, tokenizer)]
    if not prompts:
        raise RequestError("The batch is empty.")
    for prompt in prompts:
        _check_prompt(prompt, limits)
    return prompts, is_batch


def _encode(text: Any, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(text, str):
        raise MalformedBody(f"text must be a string or a list of strings, got {type(text).__name__}.")
    if tokenizer is None:
        raise RequestError("This model has no tokenizer: send input_ids.")
    return tokenizer.encode(text)


def _check_prompt(prompt: Any, limits: ModelLimits) -> None:
    if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
        raise MalformedBody("input_ids must be a list of integers, or a list of such lists.")
    if not prompt:
        raise RequestError("The prompt is empty.")
    if len(prompt) >= limits.context_length:
        raise RequestError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        bad = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise RequestError(f"Token id {bad} is not in the vocabulary (0 to {limits.vocab_size - 1}).")


def _params(raw: Any, count: int, is_batch: bool) -> list[SamplingParams]:
    if isinstance(raw, list):
        if not is_batch or len(raw) != count:
            raise RequestError(f"sampling_params has {len(raw)} entries for {count} prompts.")
        return [SamplingParams.from_json(item) for item in raw]
    return [SamplingParams.from_json(raw)] * count


def _max_new_tokens(params: SamplingParams, prompt_length: int, context_length: int) -> int:
    left = context_length - prompt_length
    if params.max_new_tokens is None:
        return min(DEFAULT_MAX_NEW_TOKENS, left)
    if params.max_new_tokens > left:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
            f"You requested a total of {prompt_length + params.max_new_tokens} tokens: {prompt_length} tokens from the "
            f"input messages and {params.max_new_tokens} tokens for the completion."
        )
    return params.max_new_tokens


def _input_logprobs_from(return_logprob: bool, start: int, prompt_length: int) -> int | None:
    if not return_logprob or start < 0 or start >= prompt_length:
        return None
    return start


def _stop_text(params: SamplingParams, tokenizer: Tokenizer | None) -> IncrementalText | None:
    if not params.stop:
        return None
    if tokenizer is None:
        raise RequestError("This model has no tokenizer: stop strings cannot be found; use stop_token_ids.")
    return IncrementalText(tokenizer, params.skip_special_tokens)


def _new_rid() -> str:
    return f"{random.getrandbits(128):032x}"


def _rids(raw: Any, count: int, copies: list[int]) -> tuple[frozenset[str], list[str]]:
    """The ids that the client gave, and one for each sequence."""
    if raw is None:
        return frozenset(), [_new_rid() for _ in range(sum(copies))]
    if isinstance(raw, str):
        base = [raw] if count == 1 else [f"{raw}_{i}" for i in range(count)]
        given = frozenset([raw])
    elif isinstance(raw, list) and all(isinstance(item, str) for item in raw):
        if len(raw) != count:
            raise RequestError(f"rid has {len(raw)} entries for {count} prompts.")
        base, given = raw, frozenset(raw)
    else:
        raise MalformedBody("rid must be a string or a list of strings.")
    rids = [rid if n == 1 else f"{rid}_{copy}" for rid, n in zip(base, copies, strict=True) for copy in range(n)]
    if len(set(rids)) < len(rids):
        raise RequestError(f"Duplicate request IDs within one request: {raw}")
    return given, rids


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise MalformedBody(f"{name} must be true or false, got {value!r}.")
    return bool(value)


def _per_prompt(body: dict[str, Any], name: str, count: int, kind: type, default: Any) -> list[Any]:
    """A field that is one value for all prompts, or a list of one for each; null counts as `default`."""
    value = body.get(name)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts.")
    values = [default if item is None else item for item in values]
    if not all(type(item) is kind for item in values):
        raise MalformedBody(f"{name} must be of type {kind.__name__}, got {value!r}.")
    return values
