"""What comes back from generation is checked, whoever has generated it."""

from __future__ import annotations

from typing import Any

import pytest

from miles.utils.types import Sample
from tests.fast.fakes import answer, group_indexes
from tests.fast.rollout.fully_async_setup import running, train
from tests.fast.virtual_time import virtual


@pytest.mark.parametrize("member", [None, 7, "answer", {"response": "x"}])
@virtual
async def test_something_else_in_the_place_of_a_sample_is_named_with_the_group(monkeypatch, member):
    async def generate(state: Any, group: list[Sample], **_: Any) -> list[Any]:
        return [answer(group)[0], member] if group[0].group_index == 1 else answer(group)

    async with running(monkeypatch, generate) as fn:
        with pytest.raises(
            TypeError, match=r"generating group 1 \(samples 2..3\) returned .* in the place of a sample"
        ):
            await fn(train())


@virtual
async def test_a_status_in_words_is_named_with_the_sample(monkeypatch):
    async def generate(state: Any, group: list[Sample], **_: Any) -> list[Sample]:
        return answer(group, status="aborted" if group[0].group_index == 1 else Sample.Status.COMPLETED)  # type: ignore

    async with running(monkeypatch, generate) as fn:
        with pytest.raises(TypeError, match="sample 2 of group 1 came back with the text 'aborted' as its status"):
            await fn(train())


@pytest.mark.parametrize("status", [Sample.Status.ABORTED, Sample.Status.FAILED])
@virtual
async def test_a_group_with_a_sample_without_an_answer_starts_over(monkeypatch, status):
    tries: list[int] = []

    async def generate(state: Any, group: list[Sample], **_: Any) -> list[Sample]:
        tries.append(group[0].group_index or 0)
        answer(group)
        if tries.count(1) == 1 and group[0].group_index == 1:
            group[1].status = status
        return group

    async with running(monkeypatch, generate) as fn:
        output = await fn(train())
        assert group_indexes(output.samples)[0] == 0
        assert fn.ledger.recycled == 1
        assert all(sample.status is Sample.Status.COMPLETED for group in output.samples for sample in group)
