"""Flags that are known but not available: each with the reason and what to use instead.

A launch script that passes one gets that answer instead of "unrecognized argument". A flag is refused unless its value
is the default, which stays on `args` because plug-ins read it. `refused_values` has the flags that work, but not with
every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.utils.flag_rules import json_value
from miles.utils.refusals import Refusal, RefusedFlag, either, switch, switch_off, value, values
from miles.utils.refused_values import REFUSED_VALUES

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

_ROUTER_PREFILL = tuple(
    switch(f"--router-{name}") for name in ("pd-disaggregation", "mini-lb", "dp-aware", "enable-igw")
) + tuple(
    values(f"--router-{name}")
    for name in ("prefill", "decode", "prefill-selector", "decode-selector", "prefill-policy", "decode-policy")
)

REFUSED_FLAGS: tuple[Refusal, ...] = (
    Refusal(
        "trainer and engines on the same devices, taking turns, is not available",
        "give the engines devices of their own (--rollout-num-gpus)",
        (
            switch("--colocate"),
            switch("--offload"),
            either("--offload-train"),
            either("--offload-rollout"),
            values("--offload-rollout-level", ["kv_cache", "weight"]),
            value("--offload-train-target", "cpu"),
            value("--offload-train-disk-dir"),
            value("--offload-train-disk-chunk-mb", 256),
            value("--train-memory-margin-bytes", 1024**3),
            switch_off("--disable-weights-backuper", "enable_weights_backuper"),
        ),
    ),
    Refusal(
        "there is no critic",
        "--advantage-estimator grpo, gspo or reinforce_plus_plus, which need none",
        (
            value("--critic-num-nodes", kind=int),
            value("--critic-num-gpus-per-node", kind=int),
            value("--num-critic-only-steps", 0),
            value("--critic-load"),
            value("--critic-save"),
            value("--critic-lr", kind=float),
            value("--critic-lr-warmup-iters", 0),
            value("--value-clip", 0.2),
            value("--lambd", 1.0),
        ),
    ),
    Refusal(
        "LoRA is not available",
        "train all weights: drop the LoRA flags",
        (
            value("--lora-rank", 0),
            value("--lora-alpha", 16),
            value("--lora-dropout", 0.0),
            value("--lora-type", "lora"),
            value("--target-modules"),
            value("--exclude-modules"),
            value("--lora-adapter-path"),
            switch("--lora-sync-from-tensor"),
            switch("--lora-base-cpu-backup"),
            switch("--experts-shared-outer-loras"),
            switch("--check-lora-weight-equal"),
            switch_off("--no-sglang-lora-use-virtual-experts", "sglang_lora_use_virtual_experts"),
            value("--multi-lora-n-adapters", 0),
            RefusedFlag("--multi-lora-adapter", [], {"nargs": 2, "action": "append"}),
            value("--multi-lora-idle-poll-s", 5.0),
            value("--multi-lora-http-server-path"),
            value("--multi-lora-backend-path"),
            value("--multi-lora-api-port", 8068),
            switch_off("--multi-lora-disable-service-mode", "multi_lora_service_mode"),
            value("--multi-lora-max-adapter-global-batch-size", kind=int),
            value("--multi-lora-max-coalesce-wait-s", 0.5),
            value("--multi-lora-max-empty-wait-s", 30.0),
        ),
    ),
    Refusal(
        "on-policy distillation is not available",
        "--use-kl-loss with --ref-load holds the policy near another one",
        (
            switch("--use-opd"),
            value("--opd-type"),
            value("--opd-kl-coef", 1.0),
            value("--opd-log-prob-top-k", 0),
            value("--opd-top-k-strategy", "only-student"),
            value("--opd-reward-weight-mode", "student_p"),
            value("--opd-teacher-load"),
            value("--opd-teacher-ckpt-step", kind=int),
        ),
    ),
    Refusal(
        "the trainer routes tokens to experts itself; what the engine chose is not replayed",
        "drop the flag",
        (
            switch("--use-routing-replay"),
            switch("--use-rollout-routing-replay"),
            switch("--use-indexer-replay"),
            switch("--use-rollout-indexer-replay"),
            switch("--freeze-indexer"),
        ),
    ),
    Refusal(
        "the model is built from config.json for Qwen3 (dense, experts), Qwen2 and Llama; there are no other layers",
        "drop the flag",
        (
            values("--spec"),
            value("--custom-model-provider-path"),
            value("--linear-attention-backend", "fla"),
            value("--miles-dsa-topk-backend", "torch"),
            value("--dsa-attention-backend", "tilelang"),
            values("--extra-high-precision-layers-hf", ()),
            values("--extra-high-precision-layers-megatron", ()),
            value("--mtp-num-layers", kind=int),
            value("--mtp-loss-scaling-factor", 0.2),
            switch("--enable-mtp-training"),
        ),
    ),
    Refusal(
        "there is one way to split sequences and samples over ranks",
        "drop the flag",
        (
            switch("--allgather-cp"),
            switch("--indep-dp"),
        ),
    ),
    Refusal(
        "the first forward pass of the trainer gives the old log-probabilities; other sources are not available",
        "--use-rollout-logprobs, or --use-tis to correct the difference",
        (
            switch("--true-on-policy-mode"),
            switch("--recompute-logprobs-via-prefill"),
            switch("--keep-old-actor"),
            switch("--use-rollout-entropy"),
        ),
    ),
    Refusal(
        "the loss is computed as a whole, and nothing else is offered to save memory there",
        "smaller micro batches: --micro-batch-size, or --use-dynamic-batch-size with --max-tokens-per-gpu",
        (switch("--recompute-loss-function"), switch("--low-memory-resume")),
    ),
    Refusal(
        "batches travel through Ray's object store, one object for each data-parallel rank",
        "drop the flag",
        (
            value("--object-store-backend", "ray"),
            value("--mooncake-store-init-kwargs"),
            value("--mooncake-replica-num", 1),
            switch("--delay-split-train-data-by-dp"),
        ),
    ),
    Refusal(
        "weights travel by broadcast, or as whole files that engines read where they were written",
        "--update-weight-transfer-mode broadcast (the default), or disk-delta with --update-weight-disk-dir",
        (
            value("--update-weight-local-checkpoint-dir"),
            value("--update-weight-delta-encoding", "xor"),
            value("--update-weight-delta-checksum", "xxh3-128"),
            value("--custom-update-weight-post-write-path"),
            value("--p2p-transfer-num-workers", 4),
            value("--p2p-transfer-timeout", 30.0),
        ),
    ),
    Refusal(
        "Ray places the run's processes, and all engines are alike",
        "--rollout-num-gpus, --rollout-num-gpus-per-engine and the --sglang-* flags",
        (
            switch("--pin-rollout-manager-to-head"),
            value("--sglang-config"),
        ),
    ),
    Refusal(
        "separate prefill servers are not available",
        "regular engines: drop the flag",
        (value("--prefill-num-servers", kind=int), *_ROUTER_PREFILL),
    ),
    Refusal(
        "the router is sglang-router",
        "--sglang-router-policy, --sglang-router-request-timeout-secs and the --router-* flags",
        (
            switch("--use-miles-router"),
            value("--miles-router-timeout", kind=float),
            value("--miles-router-max-connections", kind=int),
            value("--miles-router-health-check-failure-threshold", 3),
            value("--router-policy"),
            value("--router-request-timeout-secs", kind=int),
        ),
    ),
    Refusal(
        "miles sets this for each server itself (models with code of their own are never trusted)",
        "--hf-checkpoint, --rollout-seed, --rollout-num-gpus-per-engine and --sglang-router-ip/-port",
        tuple(
            values(f"--sglang-{name}")
            for name in (
                *("model-path", "model", "host", "port", "nccl-port", "dist-init-addr", "random-seed"),
                *("nnodes", "node-rank", "gpu-id-step", "base-gpu-id"),
            )
        )
        + tuple(
            switch(f"--sglang-{name}")
            for name in (
                *("trust-remote-code", "enable-memory-saver", "skip-server-warmup"),
                *("enable-return-routed-experts", "enable-return-indexer-topk"),
            )
        )
        + (value("--router-model-path"), value("--router-tokenizer-path"), value("--router-host"))
        + (value("--router-port", kind=int), values("--router-worker-urls")),
    ),
    Refusal(
        "the session server and agent functions are not available",
        "--custom-generate-function-path with a function that runs the turns itself",
        (
            switch("--use-session-server"),
            value("--session-server-ip"),
            values("--session-server-port", kind=int),
            value("--tito-model", "default"),
            value("--custom-agent-function-path"),
            value("--max-seq-len", kind=int),
        ),
    ),
    Refusal(
        "it is declared by the generate function that reads it, and that is not the one chosen",
        "--custom-generate-function-path miles.rollout.generate_hub.multi_turn.generate",
        (
            value("--generate-max-turns", 16),
            value("--generate-tool-specs-path"),
            value("--generate-tool-call-parser"),
            value("--generate-execute-tool-function-path"),
        ),
    ),
    Refusal(
        "prompts come from the data source of this process; rollout buffer services are not available",
        "--data-source-path with a class of your own",
        (
            value("--rollout-buffer-url"),
            value("--fetch-trajectory-retry-times", -1),
            value("--min-batch-collection-ratio", 1.0),
            value("--rollout-task-type", "math"),
            value("--loss-mask-type", "qwen"),
        ),
    ),
    Refusal(
        "images, video and audio are not available",
        "prompts of text",
        (value("--multimodal-keys"),),
    ),
    Refusal(
        "engines recover by themselves, and nothing controls that from outside",
        "--use-fault-tolerance, and the --rollout-health-check-* flags",
        (
            value("--control-server-port", 0),
            switch("--mini-ft-controller-enable"),
            value("--mini-ft-controller-poll-interval", 10.0),
            value("--mini-ft-controller-resume-delay", 10.0),
            value("--ci-ft-test-actions"),
        ),
    ),
    Refusal(
        "all checkpoints are kept",
        "--save with --save-interval; delete old sets outside the run",
        (
            value("--save-retain-interval", kind=int),
            value("--ref-ckpt-step", kind=int),
        ),
    ),
    Refusal(
        "trainer processes have the environment of Ray's workers",
        "environment variables of the shell, or Ray's runtime_env",
        (RefusedFlag("--train-env-vars", {}, {"type": json_value}),),
    ),
    Refusal(
        "there is no hook on trainer ranks between a rollout's data and its training step",
        "--custom-convert-samples-to-train-data-path changes the data, --custom-megatron-before-train-step-hook-path "
        "the step",
        (value("--rollout-data-postprocess-path"),),
    ),
    Refusal(
        "the reference policy stays what --ref-load says",
        "a new run with another --ref-load",
        (value("--ref-update-interval", kind=int),),
    ),
    Refusal(
        "MLflow is not available",
        "--use-wandb, or the JSON lines and TensorBoard events in the run directory",
        (
            switch("--use-mlflow"),
            value("--mlflow-tracking-uri"),
            value("--mlflow-experiment-name", "miles"),
            value("--mlflow-run-name"),
            value("--mlflow-run-id"),
        ),
    ),
    Refusal(
        "Prometheus is not available",
        "metrics.jsonl in the run directory; sglang-router's own metrics are at --router-prometheus-port",
        (
            switch("--use-prometheus"),
            value("--prometheus-port", 9090),
            value("--prometheus-run-name"),
        ),
    ),
    Refusal(
        "this breakdown of metrics is not available",
        "--custom-rollout-log-function-path and --custom-eval-rollout-log-function-path with a function of your own",
        (
            switch("--log-multi-turn"),
            value("--log-reward-category"),
            switch("--log-correct-samples"),
        ),
    ),
    Refusal(
        "dumps for debugging are not available",
        "metrics.jsonl and the samples shown in the run's log; --custom-rollout-log-function-path sees every sample",
        (
            value("--save-debug-rollout-data"),
            value("--save-debug-trajectory-data"),
            value("--load-debug-rollout-data"),
            value("--load-debug-rollout-data-subsample", kind=float),
            value("--save-debug-train-data"),
            value("--save-debug-event-data"),
            value("--dump-details"),
            switch("--enable-event-analyzer"),
            switch("--enable-witness"),
            value("--witness-buffer-size", 1048576),
        ),
    ),
    Refusal(
        "runs with one half switched off are not available",
        "--lr 0 generates without learning; --num-rollout ends a run early",
        (
            switch("--debug-rollout-only"),
            switch("--debug-train-only"),
            switch("--debug-skip-weight-update"),
            switch("--debug-disable-optimizer"),
            value("--debug-exit-after-rollout", kind=int),
        ),
    ),
    Refusal(
        "profiling inside the trainer is not available",
        "perf/* metrics and timeline.jsonl in the run directory; py-spy or torch.profiler from outside",
        (
            value("--memory-snapshot-dir", "."),
            value("--memory-snapshot-num-steps", kind=int),
            values("--profile-target", ["train_overall"]),
            value("--memory-recorder", "torch"),
            value("--env-report", ""),
        ),
    ),
    Refusal(
        "weights are compared as a whole and exactly",
        "--check-weight-update-equal",
        (
            value("--check-weight-update-selector", "all"),
            values("--check-weight-update-skip-list"),
            switch("--check-weight-update-allow-quant-error"),
            switch("--save-local-weight-checksum"),
        ),
    ),
    Refusal(
        "these checks belong to another test suite",
        "--check-weight-update-equal; train/grad_norm, train/ppo_kl and train/train_rollout_logprob_abs_diff in "
        "metrics.jsonl",
        (
            switch("--ci-disable-kl-checker"),
            switch("--ci-disable-logprobs-checker"),
            value("--ci-metric-checker-key"),
            value("--ci-metric-checker-threshold", kind=float),
            value("--ci-save-grad-norm"),
            value("--ci-load-grad-norm"),
            switch("--ci-save-model-hash"),
            switch("--ci-check-model-hash"),
            value("--ci-inject-rollout-data-path"),
            value("--ci-inject-rollout-data-start-rollout-id", kind=int),
            value("--ci-inject-rollout-data-min-match-ratio", 0.9),
            switch("--debug-deterministic-collective"),
        ),
    ),
    Refusal(
        "one HTTP client in the rollout process talks to the engines directly",
        "drop the flag; --sglang-server-concurrency bounds what is in flight",
        (value("--http-proxy"), switch("--use-distributed-post")),
    ),
    Refusal(
        "this feature of later releases is not available yet",
        "drop the flag",
        (
            value("--session-message-matcher"),
            switch("--skip-actor-forward-only"),
            switch("--allow-partial-train-step"),
            switch("--balance-by-flops"),
        ),
    ),
)


REFUSED_FAMILIES = {
    "--eval-sglang-": "engines that only evaluate (--eval-num-gpus) are started with the flags of the engines that "
    "generate. Instead: set --sglang-*, which holds for both.",
}
"""What flags begin with that name an endless list -> why they are refused, and what to do instead."""


def add_flags(parser: ArgumentParser, taken: frozenset[str] = frozenset()) -> None:
    """Declare the refused flags, so that they are recognised; their defaults stay on `args`.

    `taken` names the flags that plug-ins have declared for themselves: those work, and are left alone.
    """
    group = parser.add_argument_group("known but not available")
    for refusal in REFUSED_FLAGS:
        help_text = f"Not available: {refusal.reason}. Instead: {refusal.instead}.".replace("%", "%%")
        for refused in refusal.flags:
            if refused.flag not in taken:
                group.add_argument(refused.flag, default=refused.default, help=help_text, **refused.options)


@dataclass(frozen=True)
class Refused:
    """A flag on `args` that is not available, or whose value is not, and the line that says so."""

    flag: str
    dest: str
    message: str


def refused(args: Namespace, taken: frozenset[str] = frozenset()) -> Iterator[Refused]:
    """Each flag and value on `args` that is not available."""
    for refusal in REFUSED_FLAGS:
        for row in refusal.flags:
            if row.flag not in taken and not _is_default(getattr(args, row.dest), row.default):
                message = f"{row.flag} is not available: {refusal.reason}. Instead: {refusal.instead}."
                yield Refused(row.flag, row.dest, message)
    for refused_value in REFUSED_VALUES:
        given = getattr(args, refused_value.dest)
        if not refused_value.allows(given):
            message = (
                f"{refused_value.flag} {given} is not available: {refused_value.reason}. "
                f"Instead: {refused_value.instead}."
            )
            yield Refused(refused_value.flag, refused_value.dest, message)


def refusals(args: Namespace, taken: frozenset[str] = frozenset()) -> list[str]:
    """The lines of `refused`."""
    return [found.message for found in refused(args, taken)]


def _is_default(given: Any, default: Any) -> bool:
    if isinstance(default, tuple | list):
        return given is None or list(given) == list(default)
    return bool(given == default) and isinstance(given, bool) == isinstance(default, bool)
