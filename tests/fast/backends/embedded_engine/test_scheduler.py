from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.embedded_engine.scheduler import PauseMode, Scheduler
from tests.fast.backends.embedded_engine.tiny import (
    VOCAB_SIZE,
    full_forward_logprobs,
    hugging_face,
    make_request,
    make_scheduler,
    random_weights,
    run_until_done,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from miles.backends.embedded_engine.request import Request

TOLERANCE = 1e-5


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def assert_logprobs(reference: Any, request: Request) -> None:
    expected = full_forward_logprobs(reference, request.prompt_ids, request.output_ids, request.params.scale)
    assert request.output_logprobs == pytest.approx(expected, abs=TOLERANCE)


def steps(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        scheduler.step()


def test_logprobs_equal_a_full_forward_whatever_runs_beside(model_dir: Path, reference: Any) -> None:
    rng = random.Random(1)
    scheduler = make_scheduler(model_dir)
    shared = random_prompt(rng, 9)
    requests = [
        make_request(
            shared if i % 3 == 0 else random_prompt(rng, rng.choice([1, 2, 5, 7, 30, 61, 64, 65, 200])),
            f"r{i}",
            seed=i,
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            max_new_tokens=rng.choice([1, 3, 12, 40, 80]),
        )
        for i in range(40)
    ]
    waiting = list(requests)
    while waiting or scheduler.can_step:
        scheduler.add(waiting[:3])
        del waiting[:3]
        scheduler.step()
    for request in requests:
        assert request.finish_reason == {"type": "length", "length": request.max_new_tokens}
        assert_logprobs(reference, request)
    assert scheduler.num_running == 0


@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"]
)
def test_other_architectures_equal_a_full_forward(tmp_path: Path, architecture: str) -> None:
    extra: dict[str, Any] = {"sliding_window": None} if architecture.startswith("Mistral") else {}
    if architecture.startswith("Qwen3Moe"):
        extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if architecture.startswith("Qwen2"):
        extra["head_dim"] = 8  # that model derives it from the hidden size
    directory = write_model(tmp_path, architecture=architecture, tie_word_embeddings=False, **extra)
    scheduler = make_scheduler(directory)
    rng = random.Random(2)
    requests = [make_request(random_prompt(rng, n), f"r{n}", seed=n, max_new_tokens=70) for n in (1, 6, 20)]
    scheduler.add(requests)
    run_until_done(scheduler)
    reference = hugging_face(directory)
    for request in requests:
        assert_logprobs(reference, request)


def test_retracted_requests_go_on_under_the_new_weights_with_recomputed_kv(model_dir: Path, reference: Any) -> None:
    scheduler = make_scheduler(model_dir)
    rng = random.Random(3)
    requests = [make_request(random_prompt(rng, n), f"r{n}", seed=n, max_new_tokens=20) for n in (3, 8, 50)]
    scheduler.add(requests)
    steps(scheduler, 7)
    scheduler.pause(PauseMode.RETRACT)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.can_step) == (0, 3, False)
    weights = random_weights(scheduler.model.module, seed=5)
    scheduler.publish(weights, "1")
    scheduler.resume()
    run_until_done(scheduler)
    updated = hugging_face(model_dir, weights)
    for request in requests:
        assert request.num_retractions == 1
        assert request.version_spans(20) == [
            {"version": "default", "start": 0, "end": 7},
            {"version": "1", "start": 7, "end": 20},
        ]
        old = full_forward_logprobs(reference, request.prompt_ids, request.output_ids)
        new = full_forward_logprobs(updated, request.prompt_ids, request.output_ids)
        assert request.output_logprobs == pytest.approx(old[:7] + new[7:], abs=TOLERANCE)


@torch.no_grad()
def logprobs_with_old_cache(old: Any, new: Any, request: Request, switch: int) -> list[float]:
    """Of the tokens from `switch` on, where all earlier positions have the old weights' keys and values."""
    from transformers import DynamicCache

    ids = torch.tensor([request.prompt_ids + request.output_ids])
    cached = len(request.prompt_ids) + switch - 1
    cache = DynamicCache(config=old.config)
    old(input_ids=ids[:, :cached], past_key_values=cache, use_cache=True)
    logits = new(input_ids=ids[:, cached:-1], past_key_values=cache, use_cache=True).logits[0].double()
    wanted = ids[0, cached + 1 :, None]
    return torch.log_softmax(logits, dim=-1).gather(1, wanted)[:, 0].tolist()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("paused", [True, False])
def test_requests_in_place_go_on_with_the_old_cache(model_dir: Path, reference: Any, paused: bool) -> None:
    scheduler = make_scheduler(model_dir)
    rng = random.Random(4)
    requests = [make_request(random_prompt(rng, n), f"r{n}", seed=n, max_new_tokens=15) for n in (3, 8, 50)]
    scheduler.add(requests)
    steps(scheduler, 6)
    weights = random_weights(scheduler.model.module, seed=5)
    if paused:
        scheduler.pause(PauseMode.IN_PLACE)
        assert scheduler.num_running == 3
        assert not scheduler.can_step
    scheduler.publish(weights, "1")
    scheduler.resume()
    late = make_request(random_prompt(rng, 5), "late", max_new_tokens=4)
    scheduler.add([late])
    run_until_done(scheduler)
    updated = hugging_face(model_dir, weights)
    for request in requests:
        assert request.num_retractions == 0
        assert [span["version"] for span in request.version_spans(15)] == ["default", "1"]
        old = full_forward_logprobs(reference, request.prompt_ids, request.output_ids)
        mixed = logprobs_with_old_cache(reference, updated, request, switch=6)
        assert request.output_logprobs == pytest.approx(old[:6] + mixed, abs=TOLERANCE)
    assert late.version_spans(4) == [{"version": "1", "start": 0, "end": 4}]
    assert_logprobs(updated, late)


def test_a_version_that_changes_without_tokens_in_between_makes_no_span(model_dir: Path) -> None:
    scheduler = make_scheduler(model_dir)
    request = make_request([5, 6, 7], max_new_tokens=4)
    scheduler.add([request])
    steps(scheduler, 2)
    scheduler.publish({}, "1")
    scheduler.publish({}, "2")
    steps(scheduler, 1)
    scheduler.publish({}, str(2))
    run_until_done(scheduler)
    assert request.version_spans(4) == [
        {"version": "default", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 4},
    ]
    assert request.version_spans(2) == [{"version": "default", "start": 0, "end": 2}]


def test_pause_abort_ends_running_and_waiting_requests_with_what_they_have(model_dir: Path) -> None:
    scheduler = make_scheduler(model_dir, max_running_requests=2)
    requests = [make_request([5, 6, 7 + i], f"r{i}") for i in range(3)]
    scheduler.add(requests)
    steps(scheduler, 4)
    scheduler.pause(PauseMode.ABORT)
    assert [len(request.output_ids) for request in requests] == [4, 4, 0]
    assert requests[0].finish_reason == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    assert requests[2].finish_reason == {"type": "abort", "message": "Abort in waiting queue"}
    assert requests[2].version_spans(0) == []
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    late = make_request([8], "late", max_new_tokens=2)
    scheduler.add([late])
    assert not scheduler.can_step
    scheduler.resume()
    run_until_done(scheduler)
    assert late.finish_reason == {"type": "length", "length": 2}


def test_an_aborted_request_leaves_the_others_as_they_were(model_dir: Path, reference: Any) -> None:
    scheduler = make_scheduler(model_dir)
    requests = [make_request([5, 6, 7 + i], f"r{i}", seed=i, max_new_tokens=12) for i in range(5)]
    scheduler.add(requests)
    steps(scheduler, 5)
    assert scheduler.abort(lambda request: request.rid in ("r0", "r3")) == 2
    run_until_done(scheduler)
    assert [len(request.output_ids) for request in requests] == [5, 12, 12, 5, 12]
    for request in requests:
        assert_logprobs(reference, request)


def test_rows_are_moved_together_between_steps_too(model_dir: Path, reference: Any) -> None:
    scheduler = make_scheduler(model_dir)
    requests = [make_request([5, 6, 7 + i], f"r{i}", seed=i, max_new_tokens=2 if i < 2 else 12) for i in range(5)]
    scheduler.add(requests)
    steps(scheduler, 2)  # leaves holes in rows 0 and 1
    scheduler.pause(PauseMode.IN_PLACE)
    assert scheduler.abort(lambda request: request.rid == "r2") == 1
    assert not scheduler.flush_cache()
    assert len(scheduler.running()) == 2
    scheduler.cache.trim()
    scheduler.resume()
    run_until_done(scheduler)
    for request in requests:
        assert_logprobs(reference, request)


def test_retracted_requests_can_be_aborted_while_paused(model_dir: Path) -> None:
    scheduler = make_scheduler(model_dir)
    request = make_request([5, 6, 7])
    scheduler.add([request])
    steps(scheduler, 3)
    scheduler.pause(PauseMode.RETRACT)
    scheduler.abort(lambda _: True)
    assert request.finish_reason is not None
    assert request.finish_reason["message"] == "Aborted"
    assert len(request.output_ids) == 3


def test_a_full_kv_cache_sends_the_newest_back_and_everything_finishes(model_dir: Path, reference: Any) -> None:
    scheduler = make_scheduler(model_dir, max_total_tokens=640, context_length=256)
    rng = random.Random(6)
    requests = [make_request(random_prompt(rng, 20), f"r{i}", seed=i, max_new_tokens=150) for i in range(6)]
    scheduler.add(requests)
    for _ in range(5000):
        if not scheduler.can_step:
            break
        scheduler.step()
        assert scheduler.cache.allocated_tokens <= 640
    assert all(len(request.output_ids) == 150 for request in requests)
    assert requests[0].num_retractions == 0
    assert sum(request.num_retractions for request in requests) > 0
    for request in requests:
        assert_logprobs(reference, request)


def test_a_seeded_request_is_the_same_alone_and_in_company(model_dir: Path) -> None:
    rng = random.Random(7)

    def seeded() -> Request:
        return make_request([9, 8, 7], "seeded", seed=11, max_new_tokens=30, top_p=0.9)

    alone = seeded()
    scheduler = make_scheduler(model_dir)
    scheduler.add([alone])
    run_until_done(scheduler)

    accompanied = seeded()
    scheduler.add([make_request(random_prompt(rng, 5 + i), f"o{i}", seed=i, top_k=5) for i in range(9)])
    steps(scheduler, 3)
    scheduler.add([accompanied])
    steps(scheduler, 5)
    scheduler.pause(PauseMode.RETRACT)
    scheduler.resume()
    run_until_done(scheduler)
    assert accompanied.output_ids == alone.output_ids


def test_prefill_is_bounded_but_one_long_prompt_still_runs(model_dir: Path) -> None:
    scheduler = make_scheduler(model_dir, max_prefill_tokens=50)
    requests = [make_request(range(2, 2 + n), f"r{n}", max_new_tokens=1) for n in (80, 20, 20, 20)]
    scheduler.add(requests)
    scheduler.step()
    assert [bool(request.finish_reason) for request in requests] == [True, False, False, False]
    scheduler.step()
    assert [bool(request.finish_reason) for request in requests] == [True, True, True, False]


def test_max_new_tokens_0_only_scores_the_prompt(model_dir: Path, reference: Any) -> None:
    scheduler = make_scheduler(model_dir)
    prompt = [5, 9, 13, 2, 70]
    other = make_request([4, 4], "other", max_new_tokens=3)
    scored = make_request(prompt, "scored", max_new_tokens=0, input_logprobs_from=0, temperature=0.8)
    middle = make_request(prompt, "middle", max_new_tokens=2, input_logprobs_from=3)
    single = make_request([7], "single", max_new_tokens=1, input_logprobs_from=0)
    scheduler.add([other, scored, middle, single])
    run_until_done(scheduler)
    assert scored.finish_reason == {"type": "length", "length": 0}
    assert scored.output_ids == []
    assert scored.input_logprobs is not None
    assert scored.input_logprobs[0] is None
    assert scored.input_logprobs[1:] == pytest.approx(
        full_forward_logprobs(reference, prompt[:1], prompt[1:], 0.8), abs=TOLERANCE
    )
    assert middle.input_logprobs == pytest.approx(
        full_forward_logprobs(reference, prompt[:3], prompt[3:]), abs=TOLERANCE
    )
    assert single.input_logprobs == [None]
    for request in (other, middle, single):
        assert_logprobs(reference, request)


def test_joining_requests_with_one_prompt_share_its_computation(model_dir: Path, reference: Any) -> None:
    scheduler = make_scheduler(model_dir)
    requests = [make_request([5, 6, 7, 8], f"r{i}", seed=i, max_new_tokens=8) for i in range(4)]
    scheduler.add(requests)
    run_until_done(scheduler)
    assert [request.cached_tokens for request in requests] == [0, 3, 3, 3]
    assert len({tuple(request.output_ids) for request in requests}) > 1
    for request in requests:
        assert_logprobs(reference, request)


def test_flush_cache_is_refused_while_requests_are_in_flight(model_dir: Path) -> None:
    scheduler = make_scheduler(model_dir)
    scheduler.add([make_request([5, 6, 7])])
    assert not scheduler.flush_cache()
    steps(scheduler, 2)
    assert not scheduler.flush_cache()
    scheduler.pause(PauseMode.IN_PLACE)
    assert not scheduler.flush_cache()
    scheduler.pause(PauseMode.RETRACT)
    assert scheduler.flush_cache()
    assert scheduler.cache.allocated_tokens == 0
    scheduler.resume()
    run_until_done(scheduler)
    assert scheduler.flush_cache()
