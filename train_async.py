"""Asynchronous training: generation goes on while the trainer learns.

    python train_async.py ...                    one step off: batch N+1 is generated while N is trained on
    MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1 python train_async.py --fully-async ...
                                                 generation never stops: a step only drains what is finished

One step off starts batch N+1 before it trains on N, and waits for it before it updates the weights, so that a batch is
written by one version. Fully async drains batch N+1 right before it trains on it: the worker behind the drain keeps
generating through training and weight updates alike.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from miles.ray.preflight import preflight
from miles.ray.stop_signal import exit_code_of
from miles.utils.arguments import parse_or_exit, validate_for_async_driver

if TYPE_CHECKING:
    from argparse import Namespace


async def train(args: Namespace) -> None:
    from miles.ray.run import Run

    async with Run(args) as run:
        await run.update_weights()
        await run.eval_before_train()
        upcoming = None
        for rollout_id in run.rollout_ids:
            batch = await run.wait_for_batch(run.generate(rollout_id) if upcoming is None else upcoming)
            if batch is None:  # the data has ended
                break
            is_last = rollout_id + 1 == run.num_rollout
            upcoming = None if args.fully_async or is_last else run.generate(rollout_id + 1)
            await run.train(rollout_id, batch)
            await run.save_if_due(rollout_id)
            if (rollout_id + 1) % args.update_weights_interval == 0 or await run.engine_waits_for_weights():
                if upcoming is not None:
                    await run.wait_for_batch(upcoming)
                await run.update_weights()
            await run.eval_if_due(rollout_id)
            run.finish_step(rollout_id)
        await run.finish()


def main() -> int:
    args = parse_or_exit(validate_for_async_driver, preflight=preflight)

    from miles.ray.driver import run_driver

    return run_driver(train, args)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
