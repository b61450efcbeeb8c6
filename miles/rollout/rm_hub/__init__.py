"""Rewards: `async_rm` for one sample, `batched_async_rm` for several, by `--rm-type` or `--custom-rm-path`."""

from miles.rollout.rm_hub.dispatch import async_rm, batched_async_rm, check_rm_type, known_rm_types
from miles.rollout.rm_hub.math_utils import grade_answer_verl
from miles.rollout.rm_hub.remote import remote_rm

__all__ = ["async_rm", "batched_async_rm", "check_rm_type", "grade_answer_verl", "known_rm_types", "remote_rm"]
