"""The state of a fully-async rollout at one moment, as JSON-ready data, and back.

finished   groups that are queued or drained: prompt group and answers, in the order of their pulls
prompts    groups that are in flight, and those of an earlier state that wait to be issued again: without answers
ledger     counts
versions   the trainer's weight versions
data_source   its own `state_dict()`, None where it has none (the owner of the checkpoint calls its `save`)
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_buffer import DataBufferInput
from miles.rollout._fully_async_groups import take_stock
from miles.rollout._fully_async_ledger import Owner
from miles.rollout.sample_codec import decode_sample, encode_sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miles.rollout._fully_async_groups import Group, PromptGroup
    from miles.rollout._fully_async_ledger import GroupLedger
    from miles.rollout._fully_async_prompts import PromptSupply
    from miles.rollout._fully_async_versions import WeightVersions
    from miles.utils.types import Sample

FORMAT = 1


def encode_prompt_group(prompt_group: PromptGroup) -> list[Any]:
    """The samples without the answers that they may have got by now; they themselves stay as they are."""
    return [encode_sample(_without_answer(sample)) for sample in prompt_group]


def encode_finished(prompt_group: PromptGroup, group: Group) -> dict[str, Any]:
    return {"prompt": encode_prompt_group(prompt_group), "group": [_encode_member(member) for member in group]}


def decode_prompt_groups(data: Iterable[list[Any]]) -> list[PromptGroup]:
    return [[decode_sample(sample) for sample in group] for group in data]


def decode_finished(data: dict[str, Any]) -> tuple[PromptGroup, Group]:
    return [decode_sample(sample) for sample in data["prompt"]], [_decode_member(member) for member in data["group"]]


def _without_answer(sample: Sample) -> Sample:
    status = sample.status
    blank = copy.copy(sample)
    blank.reset_for_retry()
    if status is type(status).PENDING:
        blank.status = status
    return blank


def _encode_member(member: Any) -> Any:
    return [_encode_member(part) for part in member] if isinstance(member, (list, tuple)) else encode_sample(member)


def _decode_member(data: Any) -> Any:
    return [_decode_member(part) for part in data] if isinstance(data, list) else decode_sample(data)


def take_snapshot(ledger: GroupLedger, versions: WeightVersions, prompts: PromptSupply) -> dict[str, Any]:
    """No await inside, and nothing of it shares memory that changes later."""
    finished, unfinished = [], []
    for key in ledger.open.values():
        if key.owner is Owner.IN_FLIGHT or key.group is None:
            unfinished.append(encode_prompt_group(key.prompt_group))
        else:
            finished.append(encode_finished(key.prompt_group, key.group))
    return {
        "format": FORMAT,
        "finished": finished,
        "prompts": [encode_prompt_group(group) for group in prompts.waiting] + unfinished,
        "ledger": ledger.state_dict(),
        "versions": versions.state_dict(),
        "data_source": prompts.state_dict(),
    }


def restore_state(
    state: dict[str, Any], ledger: GroupLedger, versions: WeightVersions, prompts: PromptSupply
) -> list[DataBufferInput]:
    """Load everything; the finished groups, QUEUED, for the caller to queue. Raises ValueError for another format."""
    if state.get("format") != FORMAT:
        raise ValueError(f"rollout state of format {state.get('format')!r}, expected {FORMAT}")
    finished = [decode_finished(data) for data in state["finished"]]
    prompts.reissue(decode_prompt_groups(state["prompts"]))
    prompts.load_state_dict(state["data_source"])
    versions.load_state_dict(state["versions"])
    ledger.load_state_dict(state["ledger"])
    items = []
    for prompt_group, group in finished:
        key = ledger.enter(prompt_group)
        take_stock(key, group)
        items.append(DataBufferInput(prompt_group, group, key))
    return items
