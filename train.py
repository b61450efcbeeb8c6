"""Synchronous training: generate a batch, learn from it, update the weights, repeat."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from miles.ray.preflight import preflight
from miles.ray.stop_signal import exit_code_of
from miles.utils.arguments import parse_or_exit, validate_for_sync_driver

if TYPE_CHECKING:
    from argparse import Namespace


async def train(args: Namespace) -> None:
    from miles.ray.run import Run

    async with Run(args) as run:
        await run.update_weights()
        await run.eval_before_train()
        for rollout_id in run.rollout_ids:
            batch = await run.wait_for_batch(run.generate(rollout_id))
            if batch is None:  # the data has ended
                break
            await run.train(rollout_id, batch)
            await run.save_if_due(rollout_id)
            await run.update_weights()
            await run.eval_if_due(rollout_id)
            run.finish_step(rollout_id)
        await run.finish()


def main() -> int:
    args = parse_or_exit(validate_for_sync_driver, preflight=preflight)

    from miles.ray.driver import run_driver

    return run_driver(train, args)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
