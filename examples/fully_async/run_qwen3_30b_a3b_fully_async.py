r"""Trains Qwen3-30B-A3B (mixture of experts) fully asynchronously: one node of 8 GPUs, or several nodes.

    python examples/fully_async/run_qwen3_30b_a3b_fully_async.py \
        --model /data/Qwen3-30B-A3B --data /data/math --out /data/runs

The defaults are for one node: 6 GPUs train, split 3-way by layers (pipeline) and 2-way by sequence (context) with the
experts over the same two ranks and the optimizer in host memory; 2 GPUs generate as one engine. `--print` shows the
command instead of running it. What comes after `--` goes to train_async.py and wins over what is made here, so
`-- --check-config` checks everything and starts nothing.

Standard library only: it runs before anything heavy is imported, and then becomes train_async.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILTER = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


@dataclass(frozen=True)
class Launch:
    """What differs between clusters. Sizes of the model are in its config.json and nowhere else."""

    model: str = field(metadata={"help": "directory of the Qwen3-30B-A3B checkpoint"})
    data: str = field(metadata={"help": "directory with dapo-math-17k.jsonl"})
    out: str = field(metadata={"help": "directory for checkpoints and run directories; shared by all nodes"})
    train_nodes: int = field(default=1, metadata={"help": "nodes that train"})
    train_gpus_per_node: int = field(default=6, metadata={"help": "training GPUs on each of them"})
    rollout_gpus: int = field(default=2, metadata={"help": "GPUs that generate, in all"})
    gpus_per_engine: int = field(default=2, metadata={"help": "GPUs of one engine, which share its 61 GB of weights"})
    tensor_parallel: int = field(default=1, metadata={"help": "trainer ranks that share each layer"})
    pipeline_parallel: int = field(default=3, metadata={"help": "trainer ranks that share the layers among them"})
    context_parallel: int = field(default=2, metadata={"help": "trainer ranks that share each sequence"})
    expert_parallel: int = field(default=2, metadata={"help": "trainer ranks that share the experts"})
    num_rollout: int = field(default=3000, metadata={"help": "training steps in all"})
    rollout_batch_size: int = field(default=32, metadata={"help": "prompts of one step"})
    samples_per_prompt: int = field(default=8, metadata={"help": "answers to each prompt"})
    max_response_len: int = field(default=8192, metadata={"help": "most tokens of one answer"})
    max_tokens_per_gpu: int = field(
        default=6144, metadata={"help": "tokens of a micro batch on each context-parallel rank"}
    )
    batches_in_flight: float = field(default=2.0, metadata={"help": "samples in flight, in batches"})
    max_weight_staleness: int = field(default=4, metadata={"help": "most weight updates between writing and training"})
    python: str = field(default=sys.executable, metadata={"help": "interpreter that runs train_async.py"})

    def __post_init__(self) -> None:
        """Raises ValueError where the sizes do not fit together, before anything is started."""
        ranks, split = self.train_nodes * self.train_gpus_per_node, self.model_parallel
        if ranks % split:
            raise ValueError(
                f"{ranks} training GPUs do not divide into copies of the model of {split} GPUs "
                f"(tensor {self.tensor_parallel} x pipeline {self.pipeline_parallel} x context {self.context_parallel})"
            )
        if ranks % (self.expert_parallel * self.pipeline_parallel):
            raise ValueError(
                f"{ranks} training GPUs do not divide by expert parallel {self.expert_parallel} x pipeline "
                f"{self.pipeline_parallel}"
            )
        if self.rollout_gpus % self.gpus_per_engine:
            raise ValueError(f"{self.rollout_gpus} rollout GPUs do not divide into engines of {self.gpus_per_engine}")

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step: all of a rollout."""
        return self.rollout_batch_size * self.samples_per_prompt

    @property
    def max_concurrent_samples(self) -> int:
        return max(self.samples_per_prompt, int(self.batches_in_flight * self.global_batch_size))

    def flags(self) -> list[str]:
        """The arguments of train_async.py."""
        return [
            "--fully-async",
            *self._cluster(),
            *self._files(),
            *self._rollout(),
            *self._parallelism(),
            *self._learning(),
        ]

    def environment(self) -> dict[str, str]:
        """What train_async.py has in its environment besides what is there."""
        return {
            # The class-based rollout interface, which --fully-async builds on.
            "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        }

    def command(self, further: list[str]) -> list[str]:
        return [self.python, str(ROOT / "train_async.py"), *self.flags(), *further]

    def _cluster(self) -> list[str]:
        return _words(
            actor_num_nodes=self.train_nodes,
            actor_num_gpus_per_node=self.train_gpus_per_node,
            rollout_num_gpus=self.rollout_gpus,
            rollout_num_gpus_per_engine=self.gpus_per_engine,
        )

    def _files(self) -> list[str]:
        checkpoints = os.path.join(self.out, "qwen3-30b-a3b-fully-async")
        return _words(
            hf_checkpoint=self.model,
            load=checkpoints,  # the same command resumes
            save=checkpoints,
            save_interval=20,
            runs_dir=self.out,
            prompt_data=os.path.join(self.data, "dapo-math-17k.jsonl"),
            input_key="prompt",
            label_key="label",
            apply_chat_template=True,
            rollout_shuffle=True,
            rm_type="dapo",
            reward_key="score",
        )

    def _rollout(self) -> list[str]:
        return _words(
            num_rollout=self.num_rollout,
            rollout_batch_size=self.rollout_batch_size,
            n_samples_per_prompt=self.samples_per_prompt,
            rollout_max_response_len=self.max_response_len,
            rollout_temperature=1,
            dynamic_sampling_filter_path=FILTER,
            async_max_concurrent_samples=self.max_concurrent_samples,
            async_data_buffer_capacity_factor=1,
            max_weight_staleness=self.max_weight_staleness,
            pause_generation_mode="retract",
            update_weight_buffer_size=1024**3,
            no_progress_timeout=1800,
            max_empty_batches=8,
            rollout_engine="sglang",
            sglang_mem_fraction_static=0.8,
            sglang_max_running_requests=512,
            sglang_server_concurrency=512,
        )

    def _parallelism(self) -> list[str]:
        return _words(
            tensor_model_parallel_size=self.tensor_parallel,
            sequence_parallel=self.tensor_parallel > 1,
            pipeline_model_parallel_size=self.pipeline_parallel,
            context_parallel_size=self.context_parallel,
            expert_model_parallel_size=self.expert_parallel,
            expert_tensor_parallel_size=1,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=self.max_tokens_per_gpu,
            moe_token_dispatcher_type="alltoall",
        )

    def _learning(self) -> list[str]:
        return _words(
            global_batch_size=self.global_batch_size,
            advantage_estimator="grpo",
            eps_clip=0.2,
            eps_clip_high=0.28,
            calculate_per_token_loss=True,
            use_tis=True,
            tis_clip=2,
            optimizer="adam",
            lr=1e-6,
            lr_decay_style="constant",
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.98,
            clip_grad=1,
            bf16=True,
            accumulate_allreduce_grads_in_fp32=True,
            optimizer_cpu_offload=True,  # to host memory: it would not fit beside the rest
            overlap_cpu_optimizer_d2h_h2d=True,
            use_precision_aware_optimizer=True,
        )


def _words(**options: str | float | bool) -> list[str]:
    """`--name value` of each option; a true one is a switch, a false one is left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words


def parse(argv: list[str] | None = None) -> tuple[Launch, bool, list[str]]:
    """(launch, whether to print only, arguments for train_async.py); exits with a message where it is wrong."""
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    own, further = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for spec in dataclasses.fields(Launch):
        required = spec.default is dataclasses.MISSING
        kind = str if required else type(spec.default)
        text = spec.metadata["help"] + ("" if required else f" (default {spec.default})")
        parser.add_argument(
            "--" + spec.name.replace("_", "-"),
            type=kind,
            required=required,
            default=None if required else spec.default,
            help=text,
        )
    parser.add_argument("--print", action="store_true", help="show the command and stop")
    options = vars(parser.parse_args(own))
    print_only = options.pop("print")
    try:
        return Launch(**options), print_only, further
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    launch, print_only, further = parse()
    command = launch.command(further)
    if print_only:
        print(shlex.join([f"{name}={value}" for name, value in launch.environment().items()] + command))
        return
    os.environ |= launch.environment()
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
