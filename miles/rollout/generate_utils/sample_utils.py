"""Several turns of one conversation as one training sequence.

turn a:  [prompt | answer a]
turn b:  [prompt | answer a | observation | answer b]
merged:  [prompt | answer a | observation | answer b]     loss mask  1..1 | 0..0 | 1..1
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from miles.utils.types import PrefixCacheInfo, Sample, SpecInfo

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class _Pair:
    """Two consecutive turns; `observation` holds the token ids between the answer of `a` and that of `b`."""

    a: Sample
    b: Sample
    observation: list[int]
    observation_text: str


def merge_samples(samples: list[Sample], tokenizer: Any) -> Sample:
    """The turns as one sample, in which everything between two answers has loss mask 0 and log-probability 0.0.

    A turn is joined only while what is merged so far is COMPLETED and loses no replay data; the chain ends there, and
    later turns are left out. Raises ValueError for an empty list, where a turn does not start with the tokens of the
    one before, and where turns disagree on whose answer they are (index, label, ...).
    """
    if not samples:
        raise ValueError("merge_samples needs at least one sample, got an empty list")
    merged = samples[0]
    for turn in samples[1:]:
        if merged.status is not Sample.Status.COMPLETED or _has_replay_gap(merged, turn):
            break
        merged = _merge_pair(merged, turn, tokenizer)
    return merged


def _has_replay_gap(a: Sample, b: Sample) -> bool:
    names = ("rollout_routed_experts", "rollout_indexer_topk")
    return any(getattr(a, name) is not None and getattr(b, name) is None for name in names)


def _merge_pair(a: Sample, b: Sample, tokenizer: Any) -> Sample:
    if b.tokens[: len(a.tokens)] != a.tokens:
        raise ValueError(f"sample {a.index}: the tokens of a turn do not start with those of the turn before it")
    end = len(b.tokens) - b.response_length
    if end < len(a.tokens):
        raise ValueError(
            f"sample {a.index}: a turn's response ({b.response_length} tokens) reaches into the turn before it "
            f"({len(a.tokens)} of {len(b.tokens)} tokens)"
        )
    observation = b.tokens[len(a.tokens) : end]
    pair = _Pair(a, b, observation, tokenizer.decode(observation) if observation else "")
    names = {f.name for f in fields(Sample)}
    assert names == set(_RULES), f"fields of Sample without a merge rule, or the reverse: {names ^ set(_RULES)}"
    return Sample(**{name: rule(pair, name) for name, rule in _RULES.items()})


def _same(pair: _Pair, name: str) -> Any:
    first, second = getattr(pair.a, name), getattr(pair.b, name)
    if first != second:
        raise ValueError(f"sample {pair.a.index}: turns disagree on {name}: {first!r} and {second!r}")
    return first


def _first(pair: _Pair, name: str) -> Any:
    return getattr(pair.a, name)


def _last(pair: _Pair, name: str) -> Any:
    return getattr(pair.b, name)


def _last_known(pair: _Pair, name: str) -> Any:
    value = getattr(pair.b, name)
    return getattr(pair.a, name) if value is None else value


def _added(pair: _Pair, name: str) -> Any:
    return getattr(pair.a, name) + getattr(pair.b, name)


def _either(pair: _Pair, name: str) -> bool:
    return bool(getattr(pair.a, name) or getattr(pair.b, name))


def _joined_dict(pair: _Pair, name: str) -> dict[str, Any] | None:
    first, second = getattr(pair.a, name), getattr(pair.b, name)
    return None if first is None and second is None else {**(first or {}), **(second or {})}


def _response(pair: _Pair, name: str) -> str:
    return pair.a.response + pair.observation_text + pair.b.response


def _response_length(pair: _Pair, name: str) -> int:
    return pair.a.response_length + len(pair.observation) + pair.b.response_length


def _loss_mask(pair: _Pair, name: str) -> list[int]:
    masks = [[1] * s.response_length if s.loss_mask is None else s.loss_mask for s in (pair.a, pair.b)]
    return [*masks[0], *([0] * len(pair.observation)), *masks[1]]


def _per_token(pair: _Pair, name: str) -> list[float] | None:
    first, second = getattr(pair.a, name), getattr(pair.b, name)
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise ValueError(f"sample {pair.a.index}: one turn has {name} and another has none")
    return [*first, *([0.0] * len(pair.observation)), *second]


def _version_spans(pair: _Pair, name: str) -> list[list[Any]]:
    first, second = getattr(pair.a, name), getattr(pair.b, name)
    shift = pair.a.response_length + len(pair.observation)
    return [*first, *([start + shift, end + shift, version] for start, end, version in second)]


def _counters(kind: type[SpecInfo] | type[PrefixCacheInfo]) -> Callable[[_Pair, str], Any]:
    def add(pair: _Pair, name: str) -> SpecInfo | PrefixCacheInfo:
        first, second = getattr(pair.a, name).to_dict(), getattr(pair.b, name).to_dict()
        return kind(**{key: value + second[key] for key, value in first.items()})

    return add


_RULES: dict[str, Callable[[_Pair, str], Any]] = {
    "group_index": _same,
    "index": _same,
    "prompt": _first,
    "tokens": _last,
    "multimodal_inputs": _last_known,
    "multimodal_train_inputs": _last_known,
    "response": _response,
    "response_length": _response_length,
    "label": _same,
    "reward": _last_known,
    "loss_mask": _loss_mask,
    "weight_versions": _added,
    "rollout_log_probs": _per_token,
    "rollout_routed_experts": _last,
    "rollout_indexer_topk": _last,
    "remove_sample": _either,
    "teacher_log_probs": _per_token,
    "opd_reverse_kl": _per_token,
    "status": _last,
    "metadata": _joined_dict,
    "generate_function_path": _same,
    "train_metadata": _joined_dict,
    "adapter": _same,
    "reward_spec": _same,
    "routing_key": _same,
    "non_generation_time": _added,
    "spec_info": _counters(SpecInfo),
    "prefix_cache_info": _counters(PrefixCacheInfo),
    "weight_version_spans": _version_spans,
}
