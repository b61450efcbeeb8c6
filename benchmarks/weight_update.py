"""A weight update beside bare broadcasts of the same bytes: bandwidth, memory, and how long generation is paused.

    python benchmarks/weight_update.py [--rounds 5] [--layers 20] [--bucket-mib 512] [--packed]

A random Qwen3 of 2 GiB in bfloat16 goes from a megatron-core model, through the trainer's own gather and updater, to
an embedded engine in a process of its own, which receives, stages and publishes it as in a run. In turn with it, the
same buckets go through `torch.distributed.broadcast` alone, from memory that is there to memory that is there, in
another receiving process. Both over gloo on loopback where there is no GPU. At the end the weights are compared.

Wanted: at least 0.8 of the bare bandwidth while buckets are on their way, less than two buckets of memory beside the
model in the sender, and a pause of less than 1.2 times the transfer. Bandwidths are those of each one's fastest round,
since other work on the machine only slows a round down; medians stand beside them. The first round is not counted: it
is where memory is touched for the first time. Takes about a minute, 11 GiB of memory and 2 GiB of disk.

`--packed` copies every tensor into the sender's buffers, as is best on a GPU: on a CPU it shows their memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

MIB = 1024**2
WANTED_BANDWIDTH, WANTED_BUCKETS, WANTED_PAUSE = 0.8, 2.0, 1.2
START_SECS = 180.0


def config(layers: int, width: int = 2048) -> dict[str, Any]:
    """With a width of 2048, 50 million parameters a layer, and 67 million in embedding and head."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 16384,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


# --- the other processes ---


def receive(port: int, sizes: list[int]) -> None:
    """The bare receiver: the same broadcasts, for ever, into one buffer."""
    import torch
    import torch.distributed as dist

    from miles.utils.process_group import init_process_group

    group = join(port, 1, init_process_group)
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    while True:
        for size in sizes:
            dist.broadcast(buffer[:size], group_src=0, group=group)


def join(port: int, rank: int, init_process_group: Any) -> Any:
    return init_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=rank,
        group_name="bare",
        timeout_secs=START_SECS,
    )


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def wait_until_ready(url: str, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECS
    while child.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url + "/health", timeout=2) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the engine at {url} did not start")


# --- the trainer's side ---


class TrainerSide:
    """A megatron-core model of one rank and its gather; no gradients, no optimizer."""

    def __init__(self, checkpoint: Path, bucket_bytes: int) -> None:
        import torch

        from miles.backends.megatron_utils.cpu_shim import install_cpu_shim

        if not torch.cuda.is_available():
            install_cpu_shim()
        from miles.backends.megatron_utils import parallel
        from miles.backends.megatron_utils.gather import GatherPlan
        from miles.backends.megatron_utils.hf_config import HFModelConfig
        from miles.backends.megatron_utils.layout import ParallelLayout
        from miles.backends.megatron_utils.model import build_model
        from miles.backends.megatron_utils.weights import load_hf_weights
        from miles.utils.network import find_available_port

        args = argparse.Namespace(bf16=True)
        self._bucket_bytes = bucket_bytes
        layout = ParallelLayout()
        parallel.initialize_distributed(
            args, layout, rank=0, world_size=1, master_addr="127.0.0.1", master_port=find_available_port()
        )
        self.hf = HFModelConfig.from_dir(checkpoint)
        self.stages = build_model(self.hf, args, layout)
        load_hf_weights(self.stages, checkpoint, self.hf)
        self.plan = GatherPlan.make(self.stages, self.hf)

    def pieces(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        from miles.backends.megatron_utils.gather import gathered_weights
        from miles.backends.megatron_utils.wire import WirePacker

        return gathered_weights(self.plan, self.stages, self.hf, WirePacker.piece_bytes(self._bucket_bytes))

    def change(self) -> None:
        """As a training step would."""
        import torch

        with torch.no_grad():
            for stage in self.stages:
                for parameter in stage.parameters():
                    parameter.mul_(1.01)

    def checksums(self) -> dict[str, str]:
        from miles.utils.checksum import tensor_checksum

        return {name: tensor_checksum(tensor) for piece in self.pieces() for name, tensor in piece}


def write_checkpoint(directory: Path, layers: int, width: int = 2048) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config(layers, width)
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    noise = (0.02 * torch.randn(4 * MIB)).bfloat16()
    tensors = {}
    for name, parameter in model.named_parameters():
        repeats = -(-parameter.numel() // noise.numel())
        tensors[name] = noise.repeat(repeats)[: parameter.numel()].view(parameter.shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


class PeakMemory:
    """The largest resident size of this process (or allocation on the GPU) within the block, beside the one before."""

    def __enter__(self) -> PeakMemory:
        import torch

        self._on_gpu = torch.cuda.is_available()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        self._before = self._peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, _resident())

    def __exit__(self, *_: object) -> None:
        import torch

        if self._on_gpu:
            self._peak = torch.cuda.max_memory_allocated()
            return
        self._stop.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return self._peak - self._before


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- the comparison ---


def bare_seconds(group: Any, buffer: torch.Tensor, sizes: list[int]) -> float:
    import torch.distributed as dist

    start = time.perf_counter()
    for size in sizes:
        dist.broadcast(buffer[:size], group_src=0, group=group)
    return time.perf_counter() - start


def compare(options: argparse.Namespace) -> int:
    import torch

    from miles.backends.megatron_utils.weight_update import WeightUpdateConfig, WeightUpdater, compare_checksums
    from miles.utils.network import find_available_port
    from miles.utils.process_group import init_process_group

    torch.set_num_threads(1)
    bucket_bytes = options.bucket_mib * MIB
    update_config = WeightUpdateConfig.from_args(
        argparse.Namespace(update_weight_buffer_size=bucket_bytes, rollout_engine="embedded", embedded_dtype="bfloat16")
    )
    if options.packed:
        update_config = replace(update_config, loose_from_bytes=None)
    with tempfile.TemporaryDirectory(prefix="miles-weights-") as folder:
        checkpoint = Path(folder)
        write_checkpoint(checkpoint, options.layers, options.width)
        engine_port, bare_port = find_available_port(), find_available_port()
        url = f"http://127.0.0.1:{engine_port}"
        engine_words = ["-m", "miles.backends.embedded_engine", "--model-path", folder, "--port", str(engine_port)]
        engine_words += ["--dtype", "bfloat16", "--context-length", "256", "--max-total-tokens", "512"]
        with process(*engine_words, "--log-level", "warning") as engine:
            trainer = TrainerSide(checkpoint, bucket_bytes)
            sizes = [bucket.nbytes for bucket in update_config.packer().buckets(trainer.pieces())]
            with process(str(Path(__file__).resolve()), "--receive", str(bare_port), json.dumps(sizes)):
                group = join(bare_port, 0, init_process_group)
                buffer = torch.ones(max(sizes), dtype=torch.uint8)
                wait_until_ready(url, engine)
                updater = WeightUpdater(update_config)
                updater.connect([url])
                rounds = []
                for version in range(options.rounds + 1):
                    bare = bare_seconds(group, buffer, sizes)
                    trainer.change()
                    with PeakMemory() as memory:
                        times = updater.update(trainer.pieces(), version)
                    rounds.append({**times, "bare": bare, "extra": memory.extra})
                compare_checksums(trainer.checksums(), updater.checksums()[0], url)
                updater.close()
    return report(rounds[1:], sizes, bucket_bytes)


def report(rounds: list[dict[str, float]], sizes: list[int], bucket_bytes: int) -> int:
    """Print the medians; 0 where all that is wanted holds."""
    gib = sum(sizes) / 1024**3

    def median(of: Any) -> float:
        return statistics.median(of(a_round) for a_round in rounds)

    def best(name: str) -> float:
        return min(a_round[name] for a_round in rounds)

    transfer, pause, whole = (
        "perf/weight_update_transfer_seconds",
        "perf/weight_update_pause_seconds",
        "perf/update_weights_time",
    )
    bandwidth = best("bare") / best(transfer)
    buckets = max(a_round["extra"] for a_round in rounds) / bucket_bytes
    paused = median(lambda r: r[pause] / r[transfer])

    def row(label: str, name: str) -> str:
        line = f"{label:<16}{gib / best(name):6.2f} GiB/s at best, {gib / median(lambda r: r[name]):5.2f} as a rule"
        if name == "bare":
            return line
        by_round = median(lambda r: r["bare"] / r[name])
        return f"{line}   {best('bare') / best(name):.2f} of bare (round by round {by_round:.2f})"

    lines = [
        f"{gib:.2f} GiB in {len(sizes)} buckets; --update-weight-buffer-size {bucket_bytes // MIB} MiB; "
        f"{len(rounds)} rounds",
        row("bare broadcasts", "bare"),
        f"{row('transfer', transfer)} (wanted: at least {WANTED_BANDWIDTH})",
        row("whole update", whole),
        f"pause {median(lambda r: r[pause]):.2f} s, {paused:.3f} of the transfer, the longest "
        f"{max(r[pause] / r[transfer] for r in rounds):.3f} (wanted: under {WANTED_PAUSE})",
        f"memory beside the model {max(r['extra'] for r in rounds) / MIB:.0f} MiB, {buckets:.2f} buckets at most "
        f"(wanted: under {WANTED_BUCKETS:g})",
        "weights are equal by checksum",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if bandwidth >= WANTED_BANDWIDTH and buckets < WANTED_BUCKETS and paused < WANTED_PAUSE else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=20, help="of about 96 MiB each")
    parser.add_argument("--width", type=int, default=2048, help="of hidden states; smaller ones only try the script")
    parser.add_argument("--bucket-mib", type=int, default=512, help="512 is what miles uses unless told")
    parser.add_argument("--packed", action="store_true", help="copy all tensors into buffers, as on a GPU")
    parser.add_argument("--receive", nargs=2, metavar=("PORT", "SIZES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(int(options.receive[0]), json.loads(options.receive[1]))
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
