"""What the contract tests and the runs with real SGLang share: one small model, and one server of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.sglang.server import SglangServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Machines are shared: how long an example takes says nothing. Each test has a timeout.
settings.register_profile("miles", deadline=None)
settings.load_profile("miles")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what passed tests have recorded to be read: `record_property("shown", text)`."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "shown":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fast.backends.embedded_engine.tiny import write_model

    return write_model(tmp_path_factory.mktemp("contract-model"))


@pytest.fixture(scope="session")
def sglang_server(contract_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """Real SGLang with `contract_model`, for as many tests as possible: it takes a minute to start."""
    with SglangServer(contract_model, tmp_path_factory.mktemp("sglang") / "server.log") as server:
        yield server
