"""The rules between flags: batch arithmetic, the algorithm, defaults that are filled in, values without effect."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from miles.utils.arguments import parse_or_exit

if TYPE_CHECKING:
    from miles.utils.flag_parser import FlagParser
    from tests.fast.utils.command_lines import CommandLine

# The base command line: 4 prompts x 4 samples on 2 data-parallel ranks.


@pytest.mark.parametrize(
    ("flags", "batch", "steps"),
    [
        ([], 16, 1),
        (["--global-batch-size", "8"], 8, 2),
        (["--num-steps-per-rollout", "4"], 4, 4),
        (["--global-batch-size", "8", "--num-steps-per-rollout", "2"], 8, 2),
    ],
)
def test_batch_and_steps_follow_from_each_other(flags: list[str], batch: int, steps: int, command_line: CommandLine):
    args = command_line.parse(*flags)
    assert (args.global_batch_size, args.num_steps_per_rollout) == (batch, steps)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--global-batch-size", "6"], "= 16 samples do not divide into steps of --global-batch-size 6"),
        (["--global-batch-size", "32"], "= 16 samples do not divide into steps of --global-batch-size 32"),
        (["--num-steps-per-rollout", "3"], "= 16 samples do not divide into --num-steps-per-rollout 3"),
        (
            ["--global-batch-size", "4", "--num-steps-per-rollout", "2"],
            "--global-batch-size 4 x --num-steps-per-rollout 2 is not --rollout-batch-size 4 x --n-samples",
        ),
        (["--actor-num-gpus-per-node", "3"], "--global-batch-size 16 does not divide among 3 data-parallel ranks"),
        (["--tensor-model-parallel-size", "4"], "(2 ranks) must be a multiple of the model-parallel size (4)"),
        (["--expert-model-parallel-size", "2"], "this model has no experts"),
        (
            ["--actor-num-nodes", "2", "--tensor-model-parallel-size", "4"],
            "--tensor-model-parallel-size 4 does not divide the model's 2 key/value heads",
        ),
        (["--use-distributed-optimizer", "--optimizer", "sgd"], "--use-distributed-optimizer needs --optimizer adam"),
        (["--recompute-granularity", "full"], "needs --recompute-method and --recompute-num-layers"),
        (
            ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "0"],
            "--recompute-num-layers must be greater than 0, got 0",
        ),
        (
            ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "99"],
            "--recompute-num-layers 99 does not divide the",
        ),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size must be greater than 0, got 0"),
        (["--context-parallel-size", "0"], "--context-parallel-size must be greater than 0, got 0"),
        (
            [
                *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
                *("--global-batch-size", "1", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "100"),
            ],
            "gives 1 samples to each of 1 data-parallel ranks, which with --num-virtual-stages-per-pipeline-rank 2",
        ),
        (["--moe-enable-deepep"], "--moe-enable-deepep needs --moe-token-dispatcher-type flex"),
        (
            ["--micro-batch-size", "3"],
            "gives 8 samples to each of 2 ranks, which do not divide into --micro",
        ),
        (["--use-dynamic-batch-size"], "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        (
            ["--share-one-gpu"],
            "--share-one-gpu is for one trainer rank and one engine, got --actor-num-nodes 1, --actor",
        ),
        (
            ["--use-dynamic-global-batch-size", "--num-steps-per-rollout", "2"],
            "--use-dynamic-global-batch-size makes one step of a rollout, but --num-steps-per-rollout is 2",
        ),
        (["--rollout-batch-size", "0"], "--rollout-batch-size must be greater than 0, got 0"),
        (["--actor-num-gpus-per-node", "0"], "--actor-num-gpus-per-node must be greater than 0, got 0"),
        (["--n-samples-per-prompt", "-1"], "--n-samples-per-prompt must be greater than 0, got -1"),
        (["--over-sampling-batch-size", "3"], "(3) must be at least --rollout-batch-size (4)"),
        (
            ["--fully-async", "--async-max-concurrent-samples", "3"],
            "--async-max-concurrent-samples (3) must be at least --n-samples-per-prompt (4)",
        ),
        (["--fully-async", "--max-weight-staleness", "-1"], "--max-weight-staleness must be at least 0, got -1"),
        (
            ["--fully-async", "--async-data-buffer-capacity-factor", "0"],
            "--async-data-buffer-capacity-factor must be greater than 0, got 0.0",
        ),
        (
            ["--fully-async", "--async-data-buffer-capacity-factor", "1e308"],
            "--async-data-buffer-capacity-factor 1e+308 x --rollout-batch-size 4 is too large",
        ),
        (
            ["--rollout-max-context-len", "5", "--rollout-max-response-len", "12"],
            "--rollout-max-response-len (12) must not be greater than --rollout-max-context-len (5)",
        ),
        (["--eval-max-context-len", "0"], "--eval-max-context-len must be greater than 0, got 0"),
        (
            ["--eval-max-context-len", "5", "--eval-max-prompt-len", "5"],
            "--eval-max-prompt-len (5) must be less than --eval-max-context-len (5)",
        ),
        (
            ["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"],
            "--rollout-num-gpus 3 does not divide into engines of --rollout-num-gpus-per-engine 2",
        ),
        (
            ["--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"],
            "--rollout-num-gpus-per-engine must be 1 with --rollout-engine embedded",
        ),
        (["--update-weights-interval", "0"], "--update-weights-interval must be greater than 0, got 0"),
        (["--disable-rollout-global-dataset", "--num-epoch", "1"], None),
    ],
)
def test_batch_arithmetic_is_checked(flags: list[str], message: str | None, command_line: CommandLine):
    if message is None:
        assert command_line.parse(*flags).num_rollout == 3
        return
    with pytest.raises(ValueError) as error:
        command_line.parse(*flags)
    assert message in str(error.value)


def test_the_length_of_the_run_is_required(command_line: CommandLine):
    with pytest.raises(ValueError, match=r"--num-rollout \(or --num-epoch\) is required"):
        command_line.parse(without=("--num-rollout",))
    assert command_line.parse("--num-epoch", "2", without=("--num-rollout",)).num_epoch == 2
    with pytest.raises(ValueError, match="--num-epoch counts passes over the prompt file"):
        command_line.parse(
            "--num-epoch", "2", "--disable-rollout-global-dataset", without=("--num-rollout", "--prompt-data")
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1"],
            "--kl-coef (0.1) and --kl-loss-coef (0.1)",
        ),
        (["--advantage-estimator", "reinforce_plus_plus"], "reinforce_plus_plus needs --normalize-advantages"),
        (
            ["--advantage-estimator", "reinforce_plus_plus_baseline"],
            "reinforce_plus_plus_baseline needs --normalize-advantages",
        ),
        (["--use-rollout-logprobs", "--use-tis"], "--use-rollout-logprobs and --use-tis exclude each other"),
        (["--loss-type", "custom_loss"], "--loss-type custom_loss needs --custom-loss-function-path"),
        (["--eps-clip-c", "1"], "--eps-clip-c must be greater than 1, got 1.0"),
        (["--use-tis", "--tis-clip-low", "3"], "--tis-clip-low (3.0) must not be above --tis-clip (2.0)"),
        (["--gamma", "1.5"], "--gamma must be between 0 and 1, got 1.5"),
        (
            ["--use-kl-loss", "--ref-load", "Qwen3-4B_torch_dist"],
            "--ref-load: 'Qwen3-4B_torch_dist' is not a directory; it must be a Hugging Face checkpoint directory",
        ),
        (["--min-lr", "1"], "--min-lr (1.0) must not be above --lr"),
        (["--lr", "-1"], "--lr must be at least 0, got -1.0"),
        (["--adam-beta2", "1"], "--adam-beta2 must be in [0, 1), got 1.0"),
        (
            ["--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "3"],
            "--lr-warmup-fraction and --lr-warmup-iters",
        ),
        (["--rollout-top-p", "0"], "--rollout-top-p must be in (0, 1], got 0.0"),
        (["--rollout-top-k", "0"], "--rollout-top-k must be -1 (all tokens) or at least 1, got 0"),
        (["--rollout-temperature", "-1"], "--rollout-temperature must be at least 0, got -1.0"),
        (["--mask-offpolicy-in-partial-rollout"], "--mask-offpolicy-in-partial-rollout needs --partial-rollout"),
        (["--save-interval", "2"], "--save-interval needs --save"),
        (["--async-save"], "--async-save needs --save"),
        (["--start-rollout-id", "3"], "--start-rollout-id 3 leaves nothing to do"),
        (["--save-trigger-sentinel", "stop"], "--save-trigger-sentinel needs --save"),
        (["--save-hf", "out/{rollout_id}"], "--save-hf exports at each save, so it needs --save"),
        (["--save", "new", "--save-hf", "out/{step}"], "--save-hf may contain {rollout_id} only"),
        (["--http-max-retries", "-1"], "--http-max-retries must be at least 0, got -1"),
        (["--sample-max-retries", "-1"], "--sample-max-retries must be at least 0, got -1"),
        (["--sample-timeout-secs", "0"], "--sample-timeout-secs must be greater than 0, got 0.0"),
        (
            ["--sample-timeout-secs", "9", "--group-timeout-secs", "5"],
            "--sample-timeout-secs (9.0) must be at most --group-timeout-secs (5.0)",
        ),
        (["--event-loop-lag-warn-secs", "-1"], "--event-loop-lag-warn-secs must be at least 0, got -1.0"),
        (["--rm-type", "remote_rm"], "--rm-type remote_rm needs --rm-url"),
        (["--distributed-backend", "mpi"], "--distributed-backend must be nccl or gloo, got 'mpi'"),
        (["--transformer-impl", "transformer_engine"], "needs the package transformer_engine"),
    ],
)
def test_rules_name_the_flag_and_the_value(flags: list[str], message: str, command_line: CommandLine):
    with pytest.raises(ValueError) as error:
        command_line.parse(*flags)
    assert message in str(error.value)


def test_a_response_length_is_required_unless_the_user_generates(command_line: CommandLine):
    without = ("--rollout-max-response-len",)
    with pytest.raises(ValueError, match=r"--rollout-max-response-len .* is required"):
        command_line.parse(without=without)
    assert command_line.parse("--rollout-max-context-len", "64", without=without).rollout_max_response_len == 64
    command_line.parse("--custom-generate-function-path", "collections.OrderedDict", without=without)


def test_defaults_are_filled_in(command_line: CommandLine):
    args = command_line.parse("--reward-key", "score", "--rollout-max-context-len", "64", "--use-kl-loss")
    assert args.over_sampling_batch_size == 4
    assert args.eval_reward_key == "score"
    assert args.rollout_max_prompt_len == 63
    assert args.eps_clip_high == args.eps_clip == 0.2
    assert args.ref_load == args.hf_checkpoint
    assert args.rollout_num_gpus == 1
    assert args.update_weight_group is None
    tolerant = command_line.parse("--use-fault-tolerance", "--rollout-num-gpus", "2")
    assert tolerant.update_weight_group == "own", "else an engine that fails would take the others along"
    assert command_line.parse().rollout_max_context_len == 512, "the model's own"
    assert args.embedded_device == "cpu"
    assert args.distributed_backend == "gloo"
    assert args.expert_tensor_parallel_size == 1
    assert args.eval_datasets == []


def test_defaults_that_are_not_needed_stay_none(command_line: CommandLine):
    args = command_line.parse()
    assert args.ref_load is None
    assert args.rollout_max_prompt_len is None
    assert args.max_weight_staleness is None


def test_destinations_of_switches_that_turn_something_off(command_line: CommandLine):
    args = command_line.parse()
    assert args.grpo_std_normalization is True
    assert args.rewards_normalization is True
    assert args.rollout_global_dataset is True
    assert args.compute_advantages_and_returns is True
    assert args.check_for_nan_in_loss_and_grad is True
    args = command_line.parse(
        "--disable-grpo-std-normalization",
        "--disable-rewards-normalization",
        "--disable-compute-advantages-and-returns",
        "--no-check-for-nan-in-loss-and-grad",
    )
    assert args.grpo_std_normalization is False
    assert args.rewards_normalization is False
    assert args.compute_advantages_and_returns is False
    assert args.check_for_nan_in_loss_and_grad is False


def test_one_sample_a_prompt_has_no_standard_deviation(command_line: CommandLine):
    assert command_line.parse("--n-samples-per-prompt", "1").grpo_std_normalization is False


def test_ci_test_checks_weight_updates(command_line: CommandLine):
    assert command_line.parse("--ci-test").check_weight_update_equal
    assert not command_line.parse("--ci-test", "--ci-disable-weight-update-checker").check_weight_update_equal


def test_each_run_gets_its_own_directory(command_line: CommandLine):
    first = command_line.parse().run_dir
    assert first.startswith(str(command_line.directory / "runs"))
    assert not (command_line.directory / "runs").exists(), "only a driver makes it"
    runs = [parse_or_exit(argv=command_line.argv()).run_dir for _ in range(2)]
    assert len(set(runs)) == 2
    assert len(list((command_line.directory / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (["--max-weight-staleness", "2"], "--max-weight-staleness has no effect without --fully-async"),
        (["--fully-async", "--over-sampling-batch-size", "8"], "--over-sampling-batch-size has no effect with"),
        (["--sample-timeout-secs", "20000"], "--sample-timeout-secs 20000.0 has no effect on a single request"),
        (["--kl-loss-coef", "0.1"], "--kl-loss-coef has no effect without --use-kl-loss"),
        (["--kl-coef", "0.1"], "--kl-coef has no effect with --advantage-estimator grpo"),
        (["--gamma", "0.9"], "--gamma has no effect with --advantage-estimator grpo"),
        (["--tis-clip", "3"], "have no effect without --use-tis"),
        (["--opsm-delta", "3"], "--opsm-delta has no effect without --use-opsm"),
        (["--ref-load", "elsewhere"], "--ref-load has no effect without --use-kl-loss"),
        (["--num-epoch", "3"], "--num-epoch has no effect: --num-rollout is given"),
        (["--max-tokens-per-gpu", "64"], "have no effect without --use-dynamic-batch-size"),
        (
            ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "4"],
            "--max-tokens-per-gpu 4 is less than one answer may have (--rollout-max-response-len 16)",
        ),
        (["--lr-decay-style", "constant", "--min-lr", "0"], "have no effect with --lr-decay-style constant"),
        (["--wandb-group", "mine"], "no effect without --use-wandb: --wandb-group"),
        (["--n-samples-per-prompt", "1"], "so nothing is learned"),
        (["--sequence-parallel"], "--sequence-parallel has no effect with --tensor-model-parallel-size 1"),
        (["--optimizer-cpu-offload"], "no effect without a GPU, where optimizer states are in CPU memory anyway"),
        (["--no-save-optim"], "--no-save-optim has no effect without --save"),
        (["--reset-optimizer-states"], "--reset-optimizer-states has no effect without --load"),
        (["--start-rollout-id", "2"], "--start-rollout-id 2 has no effect without --load but for the numbers"),
        (["--recompute-method", "block"], "have no effect without --recompute-granularity full"),
        (["--no-rope-fusion"], "has no effect here because this kernel fusion is off already"),
        (["--moe-token-dispatcher-type", "allgather"], "allgather has no effect: alltoall is used"),
        (["--attention-backend", "flash"], "--attention-backend has no effect here because"),
        (["--router-retry-max-retries", "2"], "no effect, since miles' own client decides"),
        (
            ["--sglang-mem-fraction-static", "0.8", "--sglang-cuda-graph-bs", "1", "2"],
            "no effect with --rollout-engine embedded, which is not SGLang: --sglang-cuda-graph-bs, "
            "--sglang-mem-fraction-static",
        ),
    ],
)
def test_a_legal_value_without_effect_is_a_warning(
    flags: list[str], warning: str, command_line: CommandLine, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        command_line.parse(*flags)
    assert [record.getMessage() for record in caplog.records if warning in record.getMessage()]


def test_a_command_line_without_idle_values_warns_of_nothing(
    command_line: CommandLine, caplog: pytest.LogCaptureFixture
):
    command_line.parse("--fully-async", "--max-weight-staleness", "2", "--sglang-server-concurrency", "64")
    assert caplog.records == []


def test_devices_follow_the_machine(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="--embedded-device cuda: this machine has no CUDA device"):
        command_line.parse("--embedded-device", "cuda")
    with pytest.raises(ValueError, match="--distributed-backend nccl: this machine has no CUDA device"):
        command_line.parse("--distributed-backend", "nccl")
    monkeypatch.setattr("miles.utils.arguments.cuda_device_present", lambda: True)
    args = command_line.parse()
    assert (args.embedded_device, args.distributed_backend) == ("cuda", "nccl")
    with pytest.raises(ValueError, match="--distributed-backend gloo: the trainer uses nccl"):
        command_line.parse("--distributed-backend", "gloo")


def test_an_optimizer_that_holds_the_master_weights_needs_transformer_engine_on_a_gpu(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    flags = ("--bf16", "--optimizer-cpu-offload")
    command_line.parse(*flags)
    monkeypatch.setattr("miles.backends.megatron_utils.flags.cuda_device_present", lambda: True)
    with pytest.raises(ValueError, match="--optimizer-cpu-offload need the package transformer_engine on GPUs"):
        command_line.parse(*flags)


def test_mistakes_end_a_driver_with_one_message_and_status_2(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        parse_or_exit(argv=command_line.argv("--global-batch-size", "6"))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "error: --rollout-batch-size 4 x --n-samples-per-prompt 4 = 16 samples do not divide" in error
    assert len(error.splitlines()) == 1


def lines_of(command_line: CommandLine, *flags: str, **options: Any) -> list[str]:
    """The lines of the message with which the command line is refused."""
    with pytest.raises(ValueError) as error:
        command_line.parse(*flags, **options)
    return str(error.value).splitlines()


def test_independent_mistakes_are_reported_together(command_line: CommandLine):
    lines = lines_of(
        command_line,
        *("--fully-async", "--partial-rollout", "--rollout-all-samples-process-path", "json.dumps"),
        *("--lora-rank", "8", "--train-backend", "fsdp"),
        *(
            "--global-batch-size",
            "6",
            "--min-lr",
            "1",
            "--update-weights-interval",
            "0",
            "--custom-rm-path",
            "no.where",
        ),
    )
    starts = (
        "--fully-async does not go together with --partial-rollout:",
        "--fully-async does not go together with --rollout-all-samples-process-path:",
        "--lora-rank is not available:",
        "--train-backend fsdp is not available:",
        "--rollout-batch-size 4 x --n-samples-per-prompt 4 = 16 samples do not divide",
        "--min-lr (1.0) must not be above --lr",
        "--update-weights-interval must be greater than 0",
        "--custom-rm-path: 'no.where'",
    )
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_a_refused_value_causes_no_further_mistakes(command_line: CommandLine):
    assert len(lines_of(command_line, "--advantage-estimator", "ppo", "--kl-coef", "0.1")) == 1
    assert len(lines_of(command_line, "--rollout-engine", "sglang")) == 1


def test_a_conflict_is_not_reported_again_as_refused(command_line: CommandLine):
    (line,) = lines_of(command_line, "--fully-async", "--colocate")
    assert line.startswith("--fully-async does not go together with --colocate")


def test_refused_flags_are_reported_with_unknown_and_missing_ones(command_line: CommandLine):
    lines = lines_of(command_line, "--quux", "1", "--lora-rank", "8", without=("--rollout-batch-size",))
    assert [line.split(";")[0].split(":")[0] for line in lines] == [
        "unknown flag --quux",
        "--rollout-batch-size is required",
        "--lora-rank is not available",
    ]


@pytest.mark.parametrize(("value", "shown"), [(None, "is not set"), ("0", "is '0', which switches it off")])
def test_the_missing_environment_variable_is_told_from_one_that_is_off(
    value: str | None, shown: str, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR")
    if value is not None:
        monkeypatch.setenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", value)
    (line,) = lines_of(command_line, "--fully-async")
    assert f"MILES_EXPERIMENTAL_ROLLOUT_REFACTOR {shown}. Instead:" in line


@pytest.mark.parametrize("flags", [["--eval-max-context-len", "5"], ["--rollout-max-context-len", "16"]])
def test_an_evaluation_answer_fits_into_its_context(flags: list[str], command_line: CommandLine):
    evaluate = [*flags, "--eval-prompt-data", "a", str(command_line.prompts)]
    assert command_line.parse(*evaluate).eval_datasets[0].max_response_len == 16, "training's limit is cut, not refused"
    with pytest.raises(ValueError, match=rf"data set a: max_response_len \(17\) must not be greater than {flags[0]}"):
        command_line.parse(*evaluate, "--eval-max-response-len", "17")


def test_every_float_flag_must_be_finite(command_line: CommandLine, parser: FlagParser):
    dests = parser.float_dests()
    assert {"lr", "async_data_buffer_capacity_factor", "eval_temperature", "http_timeout_secs"} <= set(dests)
    for dest in dests:
        flag = next(a.option_strings[0] for a in parser.actions() if a.dest == dest)
        for value in ("inf", "-inf", "nan"):
            (line,) = lines_of(command_line, f"{flag}={value}")
            finite = f"--{dest.replace('_', '-')} must be a finite number, got {value}"
            assert line == finite or line.startswith((f"{flag} is not available", f"{flag} {value} is not available"))
