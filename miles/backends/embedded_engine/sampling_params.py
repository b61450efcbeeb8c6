"""The sampling fields of a /generate request: parsed once, validated, frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from miles.backends.embedded_engine.errors import RequestError, UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Callable

KNOWN_BUT_UNSUPPORTED = frozenset(
    {
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "stop_regex",
        "stream_interval",
        "logit_bias",
        "custom_params",
        "beam_width",
        "watermark",
        "choice",
    }
)
"""SGLang's other sampling fields: refused unless null."""

GREEDY_TEMPERATURE = 1e-6
"""Below this temperature the most likely token is taken, as with temperature 0."""

MAX_N = 1024
MAX_STOPS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. A null field counts as absent."""

    max_new_tokens: int | None = None
    """None = 128, or what is left of the context if that is less."""
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 = greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = all."""
    min_p: float = 0.0
    """Tokens less likely than min_p times the most likely one are left out."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """The three penalties look at output tokens only."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """The model's own end tokens do not stop the request; stop_token_ids still do."""
    n: int = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility: the `tokenizers` library has no such switch."""
    no_stop_trim: bool = False
    """Leave the matched stop string or token in `text`."""
    sampling_seed: int | None = None
    """Makes the request reproducible whatever runs beside it; copies of n > 1 use seed, seed + 1, ..."""

    def __post_init__(self) -> None:
        for is_wrong, message in _RULES:
            if is_wrong(self):
                raise RequestError(message.format(p=self))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def scale(self) -> float:
        """The temperature that logits are divided by; a temperature of (nearly) 0 scales nothing."""
        return 1.0 if self.temperature < GREEDY_TEMPERATURE else self.temperature

    @property
    def filters(self) -> bool:
        """Whether sampling is from a part of the distribution only."""
        return self.top_p < 1 or self.top_k > 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's distribution as it is."""
        return not (self.is_greedy or self.filters or self.penalizes or self.min_new_tokens) and self.scale == 1

    @classmethod
    def from_json(cls, raw: Any) -> SamplingParams:
        """Parse the request's `sampling_params` object (None = all defaults).

        Raises UnsupportedField for a field that is not in this class, RequestError for a bad value.
        """
        if raw is None:
            raw = {}
        if not isinstance(raw, dict):
            raise RequestError(f"sampling_params must be an object, got {type(raw).__name__}.")
        values: dict[str, Any] = {}
        for name, value in raw.items():
            convert = _CONVERTERS.get(name)
            if convert is not None:
                if value is not None:
                    values[name] = convert(name, value)
            elif name not in KNOWN_BUT_UNSUPPORTED or value is not None:
                raise UnsupportedField(
                    f"Unsupported sampling parameter {name!r}; this engine supports: {', '.join(_CONVERTERS)}."
                )
        return cls(**values)


_RULES: tuple[tuple[Callable[[SamplingParams], bool], str], ...] = (
    (
        lambda p: p.max_new_tokens is not None and p.max_new_tokens < 0,
        "max_new_tokens must be at least 0, got {p.max_new_tokens}.",
    ),
    (
        lambda p: p.min_new_tokens < 0 or (p.max_new_tokens is not None and p.min_new_tokens > p.max_new_tokens),
        "min_new_tokens must be in [0, max_new_tokens({p.max_new_tokens})], got {p.min_new_tokens}.",
    ),
    (
        lambda p: not (math.isfinite(p.temperature) and p.temperature >= 0),
        "temperature must be a non-negative finite number, got {p.temperature}.",
    ),
    (lambda p: not 0 < p.top_p <= 1, "top_p must be in (0, 1], got {p.top_p}."),
    (lambda p: p.top_k != -1 and p.top_k < 1, "top_k must be -1 (disable) or at least 1, got {p.top_k}."),
    (lambda p: not 0 <= p.min_p <= 1, "min_p must be in [0, 1], got {p.min_p}."),
    (lambda p: not -2 <= p.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2], got {p.frequency_penalty}."),
    (lambda p: not -2 <= p.presence_penalty <= 2, "presence_penalty must be in [-2, 2], got {p.presence_penalty}."),
    (lambda p: not 0 < p.repetition_penalty <= 2, "repetition_penalty must be in (0, 2], got {p.repetition_penalty}."),
    (lambda p: not 1 <= p.n <= MAX_N, f"n must be in [1, {MAX_N}], got {{p.n}}."),
    (
        lambda p: len(p.stop) + len(p.stop_token_ids) > MAX_STOPS,
        f"at most {MAX_STOPS} stop strings and stop_token_ids are allowed.",
    ),
    (lambda p: not all(p.stop), "stop strings must not be empty."),
)
"""What makes a value wrong, and what to say then."""


def _int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise RequestError(f"{name} must be an integer, got {value!r}.")
    return int(value)


def _float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}.")
    return float(value)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}.")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise RequestError(f"{name} must be a string or a list of strings, got {value!r}.")
    return tuple(values)


def _token_ids(name: str, value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(_int(name, item) for item in values)


_SPECIAL = {"stop": _strings, "stop_token_ids": _token_ids}
_BY_TYPE = {"int": _int, "int | None": _int, "float": _float, "bool": _bool}
_CONVERTERS = {field.name: _SPECIAL.get(field.name) or _BY_TYPE[str(field.type)] for field in fields(SamplingParams)}
