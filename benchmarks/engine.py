"""The embedded engine beside Hugging Face's own batched generation, on one core, in one run.

    python benchmarks/engine.py [--requests 64] [--rounds 3]

A random Qwen3 (hidden 128, 4 layers) generates for 64 requests, at equal and at mixed lengths. Output tokens that were
asked for, per second: the batched `generate` runs every row to the longest one's end, which is what mixed lengths cost
it. Times are seconds of CPU of this single-threaded process, the contestants take turns, and the best round of each
counts, so that the ratios hold on a busy machine. transformers' own continuous batching is slow on a CPU: it runs once.
Wanted: at least 0.8 times batched `generate` at equal lengths, at least 1.3 times at mixed lengths.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.embedded_engine.kv_cache import KVCache
from miles.backends.embedded_engine.model import load_model
from miles.backends.embedded_engine.random_numbers import seed_state
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import SamplingParams
from miles.backends.embedded_engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB_SIZE = 1000
WANTED = {"equal": 0.8, "mixed": 1.3}


@dataclass(frozen=True)
class Job:
    """One request of the load."""

    prompt: list[int]
    new_tokens: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    loads = {
        "equal": [Job(_prompt(rng, 32), 64) for _ in range(options.requests)],
        "mixed": [Job(_prompt(rng, rng.randint(8, 64)), rng.randint(8, 128)) for _ in range(options.requests)],
    }
    ok = True
    with tempfile.TemporaryDirectory() as directory:
        _write_model(directory)
        for name, jobs in loads.items():
            ok &= _compare(name, jobs, directory, options.rounds)
    return 0 if ok else 1


def _compare(name: str, jobs: list[Job], directory: str, rounds: int) -> bool:
    contestants: dict[str, Callable[[list[Job]], None]] = {
        "embedded engine": _engine(directory),
        "generate": _batched_generate(directory),
    }
    continuous, reason = _continuous_batching(directory, jobs[:2])
    if continuous is not None:
        contestants["generate_batch"] = continuous
    best = dict.fromkeys(contestants, float("inf"))
    for turn in range(rounds):
        for contestant, run in contestants.items():
            if contestant == "generate_batch" and turn > 0:
                continue
            start = time.process_time()
            run(jobs)
            best[contestant] = min(best[contestant], time.process_time() - start)
    tokens = sum(job.new_tokens for job in jobs)
    _say(f"{name} lengths: {len(jobs)} requests, {tokens} output tokens")
    for contestant, seconds in best.items():
        _say(f"  {contestant:16} {seconds:7.2f} s of CPU  {tokens / seconds:8.0f} tokens/s")
    ratio = best["generate"] / best["embedded engine"]
    verdict = "ok" if ratio >= WANTED[name] else "TOO SLOW"
    _say(f"  embedded engine / generate       {ratio:5.2f}  (wanted: at least {WANTED[name]}) {verdict}")
    if continuous is None:
        _say(f"  transformers' continuous batching (generate_batch) does not run here: {reason}")
    else:
        _say(f"  embedded engine / generate_batch {best['generate_batch'] / best['embedded engine']:5.2f}")
    return ratio >= WANTED[name]


def _engine(directory: str) -> Callable[[list[Job]], None]:
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"))
    params = SamplingParams()

    def run(jobs: list[Job]) -> None:
        cache = KVCache(model.info.kv_shape, context_length=model.info.context_length, max_total_tokens=65536)
        scheduler = Scheduler(model, cache, max_running_requests=256, max_prefill_tokens=8192, version="0")
        requests = [
            Request(
                str(i),
                job.prompt,
                params,
                max_new_tokens=job.new_tokens,
                end_ids=frozenset(),
                seed_state=seed_state(i),
                return_logprob=True,
            )
            for i, job in enumerate(jobs)
        ]
        scheduler.add(requests)
        while scheduler.can_step:
            scheduler.step()
        assert all(len(r.output_ids) == job.new_tokens for r, job in zip(requests, jobs, strict=True))

    return run


def _batched_generate(directory: str) -> Callable[[list[Job]], None]:
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def run(jobs: list[Job]) -> None:
        longest = max(len(job.prompt) for job in jobs)
        padding = [longest - len(job.prompt) for job in jobs]
        ids = torch.tensor([[0] * pad + job.prompt for pad, job in zip(padding, jobs, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * len(job.prompt) for pad, job in zip(padding, jobs, strict=True)])
        new_tokens = max(job.new_tokens for job in jobs)
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )

    return run


def _continuous_batching(directory: str, probe: list[Job]) -> tuple[Callable[[list[Job]], None] | None, str]:
    """transformers' generate_batch, or the reason why it does not run on this machine."""
    from transformers import GenerationConfig, Qwen3ForCausalLM

    try:
        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()

        def run(jobs: list[Job]) -> None:
            config = GenerationConfig(
                max_new_tokens=max(job.new_tokens for job in jobs), do_sample=True, eos_token_id=-1, pad_token_id=0
            )
            done: Any = model.generate_batch([job.prompt for job in jobs], generation_config=config, progress_bar=False)
            assert len(done) == len(jobs)

        run(probe)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return run, ""


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def _write_model(directory: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
