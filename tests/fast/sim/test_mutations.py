"""The simulation is worth what it catches: every known mistake must be noticed within a few seeds."""

from __future__ import annotations

import logging

import pytest

from miles.sim.schedule import Schedule
from miles.sim.simulation import SimulationFailed, simulate
from tests.fast.sim.mutations import MUTATIONS

SEEDS = 150


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def first_failure() -> SimulationFailed | None:
    for seed in range(SEEDS):
        try:
            simulate(Schedule.from_seed(seed))
        except SimulationFailed as failed:
            return failed
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_every_mutation_is_caught(monkeypatch, capsys, mutate):
    mutate(monkeypatch)
    failed = first_failure()
    assert failed is not None, f"{mutate.__name__} went unnoticed for {SEEDS} seeds"
    with capsys.disabled():
        pass
    print(f"{mutate.__name__}: {failed}")  # noqa: T201 - shown with -rP
