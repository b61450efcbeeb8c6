"""Flags of rewards. The reward types themselves are in `miles.rollout.rm_hub`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.utils.flag_rules import require

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

PLUGIN_PATHS = ("custom_rm_path", "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("rewards")
    group.add_argument(
        "--rm-type",
        type=str,
        default=None,
        help="Built-in reward: math, dapo, deepscaler, f1, gpqa, random, deterministic_random or remote_rm; with the "
        "prefix boxed_ the content of the last \\boxed{} is scored. None: the sample's metadata['rm_type'], or "
        "--custom-rm-path.",
    )
    group.add_argument(
        "--custom-rm-path",
        type=str,
        default=None,
        help="Dotted path of async fn(args, sample) -> float or dict; called with a list of samples under --group-rm. "
        "Wins over --rm-type. None: --rm-type.",
    )
    group.add_argument(
        "--group-rm",
        action="store_true",
        default=False,
        help="Score the samples of a group together, after all are generated.",
    )
    group.add_argument(
        "--rm-url", type=str, default=None, help="URL that --rm-type remote_rm posts to. None: remote_rm is not used."
    )
    group.add_argument(
        "--reward-key",
        type=str,
        default=None,
        help="Key of the reward to train on in a dict. None: a plain number.",
    )
    group.add_argument(
        "--missing-reward",
        choices=["error", "remove"],
        default="error",
        help="What a reward of None or NaN does. error: it stops the run, naming sample and reward function. remove: "
        "the sample is not trained on (remove_sample), is left out of its group's baseline, and is counted in "
        "rollout/missing_rewards.",
    )
    group.add_argument("--eval-reward-key", type=str, default=None, help="The same for evaluation. None: --reward-key.")
    group.add_argument(
        "--custom-reward-post-process-path",
        type=str,
        default=None,
        help="Dotted path of fn(args, samples) -> (raw_rewards, rewards) that replaces the normalisation of rewards. "
        "None: by --advantage-estimator.",
    )
    group.add_argument(
        "--custom-convert-samples-to-train-data-path",
        type=str,
        default=None,
        help="Dotted path of fn(args, samples) -> dict that replaces the built-in conversion to training data. "
        "None: built in.",
    )


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    if args.rm_type is not None:
        from miles.rollout.rm_hub import check_rm_type

        check_rm_type(args.rm_type)
        if args.rm_type.removeprefix("boxed_") == "remote_rm":
            require(bool(args.rm_url), "--rm-type remote_rm needs --rm-url, the URL that scores a response")


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.custom_rm_path is not None and "rm_type" in given:
        yield "--rm-type has no effect: --custom-rm-path is given"
