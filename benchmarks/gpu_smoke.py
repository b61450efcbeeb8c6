"""One device, the whole chain: see gpu_smoke.sh.

    random checkpoint + quickstart prompts --> train_async.py --fully-async --> metrics.jsonl --> the numbers below

The model never emits its end token (one chance in its vocabulary), so every answer has the same length, and runs on
different machines do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.quickstart.make_base_model import make_tokenizer
from examples.quickstart.make_prompts import SEED, write_prompts

ROOT = Path(__file__).resolve().parents[1]
NO_DEVICE = 2
WARM_UP_STEPS = 2
"""Left out of the times: kernels are chosen and memory is allocated in them."""


@dataclass(frozen=True)
class Size:
    """A Qwen3 and the load that it gets. 240 tokens and a prompt fit the engine's length class of 256."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    prompts: int
    samples: int
    response_len: int
    max_tokens_per_gpu: int


FULL = Size(1024, 3072, 28, 16, 8, 128, 151936, prompts=16, samples=8, response_len=240, max_tokens_per_gpu=4096)
"""The shape of Qwen3-0.6B: 0.596 billion parameters."""
TINY = Size(64, 128, 2, 4, 2, 16, 1024, prompts=4, samples=4, response_len=24, max_tokens_per_gpu=4096)


def device_name() -> str | None:
    """The CUDA device and torch's version; None where there is no device. Asked in a process of its own, so that this
    one holds nothing of the device's memory."""
    ask = "import torch; print(torch.cuda.get_device_name(), 'with torch', torch.__version__)"
    answer = subprocess.run(
        [sys.executable, "-c", f"import torch\nif torch.cuda.is_available():\n    {ask}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or None


def make_checkpoint(directory: Path, size: Size) -> int:
    """Random bf16 weights in the Hugging Face layout; returns the number of parameters. Made on the CPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head_dim,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).to(torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def flags(size: Size, *, checkpoint: Path, prompts: Path, runs_dir: Path, device: str, steps: int) -> list[str]:
    """The arguments of train_async.py."""
    batch = size.prompts * size.samples
    return [
        "--fully-async",
        *("--hf-checkpoint", str(checkpoint), "--runs-dir", str(runs_dir)),
        *("--rollout-engine", "embedded", "--embedded-device", device, "--embedded-dtype", "bfloat16"),
        *("--embedded-max-running-requests", str(2 * batch)),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--share-one-gpu"),
        *("--prompt-data", str(prompts), "--input-key", "input", "--label-key", "label"),
        *("--custom-rm-path", "benchmarks.gpu_smoke_task.even_tokens"),
        *("--num-rollout", str(steps), "--rollout-batch-size", str(size.prompts)),
        *("--n-samples-per-prompt", str(size.samples), "--global-batch-size", str(batch)),
        *("--rollout-max-response-len", str(size.response_len), "--rollout-max-context-len", "256"),
        *("--async-max-concurrent-samples", str(2 * batch), "--async-data-buffer-capacity-factor", "1"),
        *("--max-weight-staleness", "4", "--no-progress-timeout", "120", "--log-sample-interval", "0"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(size.max_tokens_per_gpu)),
        *("--bf16", "--use-tis", "--lr", "1e-6", "--lr-decay-style", "constant", "--weight-decay", "0"),
    ]


def run(size: Size, work: Path, device: str, steps: int) -> list[dict[str, Any]]:
    """The whole run; returns the metrics of each step."""
    started = time.monotonic()
    parameters = make_checkpoint(work / "model", size)
    print(f"a random Qwen3 of {parameters / 1e6:.1f} million parameters, made in {time.monotonic() - started:.0f} s")
    write_prompts(work / "prompts.jsonl", count=1024, held_out=False, seed=SEED)
    command = [sys.executable, "train_async.py"]
    command += flags(
        size,
        checkpoint=work / "model",
        prompts=work / "prompts.jsonl",
        runs_dir=work / "runs",
        device=device,
        steps=steps,
    )
    environment = {**os.environ, "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False)
    print(f"\ntrain_async.py took {time.monotonic() - started:.0f} s, exit code {ended.returncode}")
    if ended.returncode:
        raise SystemExit(1)
    (run_dir,) = (work / "runs").iterdir()
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "step"]


def report(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers that the run is for, of the steps after warm-up; seconds, tokens and natural logarithms."""
    warm = steps[WARM_UP_STEPS:]
    seconds = sum(step["perf/step_time"] for step in warm)
    differences = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    return {
        "steps": len(steps),
        "step time, median, s": statistics.median(step["perf/step_time"] for step in warm),
        "generated tokens / s": sum(step["rollout/fully_async/tokens_generated"] for step in warm) / seconds,
        "trained tokens / s": sum(step["rollout/fully_async/tokens_trained"] for step in warm) / seconds,
        "tokens / s while training": statistics.median(step["perf/actor_train_tok_per_s"] for step in warm),
        "log-prob difference, first step": differences[0],
        "log-prob difference, largest": max(differences),
        "pause per weight update, mean, s": statistics.mean(step["perf/weight_update_pause_seconds"] for step in warm),
        "weights sent per update, GB": steps[-1]["perf/update_weights_bytes"] / 1e9,
        "staleness, mean": statistics.mean(step["rollout/fully_async/trained_avg_staleness"] for step in warm),
        "reward, first step": steps[0]["rollout/raw_reward"],
        "reward, last step": steps[-1]["rollout/raw_reward"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load, for trying the script")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}, which are not measured, got {options.steps}")
    if options.device == "cuda":
        name = device_name()
        if name is None:
            print("gpu_smoke: there is no CUDA device here (torch.cuda.is_available() is false).", file=sys.stderr)
            print("gpu_smoke: --device cpu --tiny tries the script itself without one.", file=sys.stderr)
            return NO_DEVICE
        print(name)
    with tempfile.TemporaryDirectory(prefix="miles-gpu-smoke-") as directory:
        steps = run(TINY if options.tiny else FULL, Path(directory), options.device, options.steps)
    numbers = report(steps)
    for name, value in numbers.items():
        print(f"  {name:<34} {value:.4g}")
    return 0 if len(steps) == options.steps else 1


if __name__ == "__main__":
    sys.exit(main())
