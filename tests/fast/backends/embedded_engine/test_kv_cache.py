from __future__ import annotations

import random

import pytest
import torch

from miles.backends.embedded_engine.kv_cache import KVCache, KVShape
from tests.fast.backends.embedded_engine.tiny import grow, make_request

SHAPE = KVShape(layers=1, kv_heads=2, head_dim=3, dtype=torch.float32, device=torch.device("cpu"))


def write(request, value: float) -> None:
    request.pool.data[:, :, request.row, :, : request.num_tokens] = value


def read(request) -> set[float]:
    return set(request.pool.data[:, :, request.row, :, : request.num_tokens].flatten().tolist())


@pytest.mark.parametrize("seed", range(5))
def test_rows_follow_their_requests_through_joins_leaves_growth_and_compaction(seed: int) -> None:
    rng = random.Random(seed)
    cache = KVCache(SHAPE, context_length=1024, max_total_tokens=8000)
    alive: dict[float, object] = {}
    for step in range(1, 400):
        action = rng.random()
        if action < 0.5:
            request = make_request([2] * rng.choice([1, 10, 60, 64, 65, 300]), max_new_tokens=10)
            if cache.join(request):
                write(request, step)
                alive[step] = request
        elif action < 0.8 and alive:
            cache.leave(alive.pop(rng.choice(list(alive))))
        elif action < 0.95 and alive:
            key = rng.choice(list(alive))
            request = alive[key]
            grow(request, [2] * rng.choice([1, 5, 50]))
            outgrown = cache.outgrown()
            assert outgrown == ([request] if request.num_tokens > request.pool.length else [])
            if outgrown and not cache.promote(request):
                cache.leave(alive.pop(key))
            else:
                write(request, key)
        else:
            rng.choice([cache.compact, cache.trim])()
        assert cache.running == len(alive)
        assert cache.allocated_tokens <= cache.max_total_tokens
    cache.compact()
    for key, request in alive.items():
        assert read(request) == {key}
        assert request.pool.requests[request.row] is request
    assert sum(len(pool.requests) for pool in cache.classes) == len(alive)


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--max-total-tokens must be at least 1024 .* got 1000"):
        KVCache(SHAPE, context_length=1024, max_total_tokens=1000)


def test_unused_memory_makes_room_for_another_class() -> None:
    cache = KVCache(SHAPE, context_length=256, max_total_tokens=256)
    short = [make_request([2]) for _ in range(4)]
    assert all(cache.join(request) for request in short)
    assert not cache.join(make_request([2]))
    long = make_request([2] * 100)
    assert not cache.join(long)
    for request in short:
        cache.leave(request)
    assert cache.join(long)
    assert cache.allocated_tokens == 256
