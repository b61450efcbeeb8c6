"""The sample: one prompt, one answer, and everything that is learned about it on its way to the trainer.

Standard library only, so that the rollout logic stays importable in milliseconds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

RolloutBatch = dict[str, Any]

MISSING_REWARD = "missing_reward"
"""Key of `Sample.metadata`: which reward function had no reward for the sample (`--missing-reward remove`)."""


class MultimodalTypes(Enum):
    """A kind of non-text input: its name in a prompt message and the placeholder in the data set."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True)
class AdapterRef:
    """A LoRA adapter by name and by the slot that it occupies in the engines."""

    name: str
    slot: int


@dataclass(frozen=True)
class RewardSpec:
    """How one sample is rewarded, where it differs from the run's flags."""

    rm_type: str | None = None
    custom_rm_path: str | None = None


@dataclass(frozen=True)
class ParamInfo:
    """One weight tensor as it is announced to the engines."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    attrs: dict[str, Any]
    size: int
    src_rank: int


@dataclass
class SpecInfo:
    """Counters of speculative decoding, added up over the calls that made one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted draft tokens / drafted tokens; 0.0 where nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Generated tokens per verification step; 0.0 where nothing was verified."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counters of one engine response."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return dict(self.__dict__)

    @classmethod
    def from_dict(cls, data: dict[str, int]) -> SpecInfo:
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


@dataclass
class PrefixCacheInfo:
    """Prompt tokens that the engine found in its prefix cache, added up over the calls that made one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached prompt tokens / prompt tokens; 0.0 where there were none."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counters of one engine response."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return dict(self.__dict__)

    @classmethod
    def from_dict(cls, data: dict[str, int]) -> PrefixCacheInfo:
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


class SampleStatus(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_finished(self) -> bool:
        """The answer is whole, or as long as it may get: it can be rewarded and trained on."""
        return self in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


_FINISH_REASON_STATUS = {
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
    "stop": SampleStatus.COMPLETED,
}


@dataclass
class Sample:
    """One answer to one prompt.

    `tokens` holds prompt and response ids; every per-token list (`loss_mask`, `rollout_log_probs`, ...) covers the
    response only and has `response_length` entries. `loss_mask` is 1 where a token is trained on and 0 where it came
    from a tool or the environment. `weight_versions` holds the versions that wrote the response, oldest first, as the
    engines reported them; `weight_version_spans` says which of its tokens each has written, as `[start, end, version]`
    over response tokens, in order (what no engine wrote is in none). Spans tell how a sample was made and not what it
    is: two samples that differ in nothing else are equal.
    """

    Status = SampleStatus

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: AdapterRef | None = None
    reward_spec: RewardSpec | None = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    weight_version_spans: list[list[Any]] = field(default_factory=list, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """A shallow copy of the fields in which the status and the two counters are plain data."""
        data = self.__dict__.copy()
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; unknown keys become attributes, so that newer files load."""
        data = dict(data)
        status = SampleStatus(data.pop("status", SampleStatus.PENDING.value))
        spec_info = SpecInfo.from_dict(data.pop("spec_info", {}))
        prefix_cache_info = PrefixCacheInfo.from_dict(data.pop("prefix_cache_info", {}))
        known = {f.name for f in fields(cls)}
        sample = cls(
            **{key: value for key, value in data.items() if key in known},
            status=status,
            spec_info=spec_info,
            prefix_cache_info=prefix_cache_info,
        )
        for key, value in data.items():
            if key not in known:
                setattr(sample, key, value)
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry `args.reward_key` where rewards are dictionaries."""
        reward_key = getattr(args, "reward_key", None)
        if not reward_key:
            return self.reward
        if not isinstance(self.reward, dict) or reward_key not in self.reward:
            raise ValueError(f"--reward-key {reward_key!r}: sample {self.index} has the reward {self.reward!r}")
        return self.reward[reward_key]

    @property
    def reward_is_placeholder(self) -> bool:
        """Whether the reward function had none for this sample: its reward of 0.0 counts in no mean."""
        return isinstance(self.metadata, dict) and MISSING_REWARD in self.metadata

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    @property
    def oldest_weight_version(self) -> int | None:
        """The smallest purely numeric version that wrote a part of the response; None where there is none."""
        numeric = [int(v) for v in self.weight_versions if isinstance(v, int) or str(v).isdecimal()]
        return min(numeric) if numeric else None

    def token_weight_versions(self) -> list[str | None]:
        """The version that wrote each response token; None where no engine wrote it, or none was reported."""
        versions: list[str | None] = [None] * self.response_length
        for start, end, version in self.weight_version_spans:
            versions[start:end] = [version] * (min(end, self.response_length) - start)
        return versions

    def validate(self) -> None:
        """Raise ValueError where a per-token list does not have the length that `response_length` and `tokens` say."""
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(value)} entries, response_length is {self.response_length}"
                )
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.tokens) - 1:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(value)} rows, "
                    f"expected len(tokens) - 1 = {len(self.tokens) - 1}"
                )

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Take over status, weight versions and counters of one engine response.

        A response that lived across weight updates reports `weight_versions` spans: each version of it is recorded
        once, oldest first. Without spans the single `weight_version` at the end of the request is recorded. The tokens
        of the response may be in `response_length` already, as its last ones, or be added afterwards.
        """
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        self.weight_versions.extend(_response_versions(meta_info))
        self._add_version_spans(meta_info)
        reason = str((meta_info.get("finish_reason") or {}).get("type"))
        self.status = _FINISH_REASON_STATUS.get(reason, self.status)

    def _add_version_spans(self, meta_info: dict[str, Any]) -> None:
        spans = _response_spans(meta_info)
        if not spans:
            return
        written = self.weight_version_spans[-1][1] if self.weight_version_spans else 0
        first = self.response_length - spans[-1][1]
        if first < written:  # the tokens of this response are not counted yet
            first = self.response_length
        self.weight_version_spans += [[first + start, first + end, version] for start, end, version in spans]

    def strip_last_output_tokens(self, n: int, tokenizer: Any) -> None:
        """Remove the last `n` response tokens and everything that is kept for them."""
        if not 0 <= n <= self.response_length:
            raise ValueError(f"cannot strip {n} tokens from a response of {self.response_length}")
        if n == 0:
            return
        self.tokens = self.tokens[:-n]
        self.response_length -= n
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[:-n])
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[:-n])
        self.weight_version_spans = [
            [start, min(end, self.response_length), version]
            for start, end, version in self.weight_version_spans
            if start < self.response_length
        ]
        response_ids = self.tokens[len(self.tokens) - self.response_length :]
        self.response = tokenizer.decode(response_ids) if response_ids else ""

    def reset_for_retry(self) -> None:
        """Forget the answer and keep the question, so that the sample can be generated again from its start.

        The status becomes ABORTED: a generate function accepts that as well as PENDING, and it tells a retry from a
        first try.
        """
        fresh = Sample()
        for name in ANSWER_FIELDS:
            setattr(self, name, copy.copy(getattr(fresh, name)))
        self.status = SampleStatus.ABORTED


ANSWER_FIELDS = (  # the status is another one
    "tokens",
    "multimodal_train_inputs",
    "response",
    "response_length",
    "reward",
    "loss_mask",
    "weight_versions",
    "weight_version_spans",
    "rollout_log_probs",
    "rollout_routed_experts",
    "rollout_indexer_topk",
    "teacher_log_probs",
    "opd_reverse_kl",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
    "remove_sample",
    "train_metadata",
)


def _response_versions(meta_info: dict[str, Any]) -> list[str]:
    spans = meta_info.get("weight_versions")
    if spans:
        distinct: dict[str, None] = dict.fromkeys(str(span["version"]) for span in spans)
        return list(distinct)
    return [str(meta_info["weight_version"])] if meta_info.get("weight_version") is not None else []


def _response_spans(meta_info: dict[str, Any]) -> list[tuple[int, int, str]]:
    """`(start, end, version)` over the tokens of one response; [] where the engine does not say enough."""
    spans = meta_info.get("weight_versions")
    if spans:
        return [(int(span["start"]), int(span["end"]), str(span["version"])) for span in spans if "end" in span]
    version, entries = meta_info.get("weight_version"), meta_info.get("output_token_logprobs")
    count = len(entries) if entries else int(meta_info.get("completion_tokens") or 0)
    return [(0, count, str(version))] if version is not None and count > 0 else []
