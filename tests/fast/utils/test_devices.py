"""What the machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from miles.utils import devices

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a device is seen, given the device files and CUDA_VISIBLE_DEVICES."""

    def seen(files: list[str], visible: str | None) -> bool:
        monkeypatch.setattr(devices.glob, "glob", lambda pattern: files)
        monkeypatch.setattr(devices.os.path, "exists", lambda path: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return devices.cuda_device_present()

    return seen


def test_a_device_is_seen_by_its_file_unless_it_is_hidden(machine: Callable[..., bool]):
    assert machine(["/dev/nvidia0"], None)
    assert machine(["/dev/nvidia0"], "0")
    assert not machine(["/dev/nvidia0"], "")
    assert not machine(["/dev/nvidia0"], "-1")
    assert not machine([], None)
    assert not machine([], "0")


def test_an_installed_package_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert not devices.sglang_installed()
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    assert devices.sglang_installed()
