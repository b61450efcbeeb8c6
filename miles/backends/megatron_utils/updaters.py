"""The ways weights reach the engines, behind one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from miles.backends.megatron_utils.disk_update import DiskWeightUpdater
from miles.backends.megatron_utils.weight_update import WeightUpdateConfig, WeightUpdater

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miles.backends.megatron_utils.engine_client import EngineClient
    from miles.backends.megatron_utils.wire import Piece


class Updater(Protocol):
    """Used by trainer rank 0 only, from one thread."""

    @property
    def engines(self) -> list[EngineClient]: ...

    def connect(self, engine_urls: list[str]) -> None:
        """Replace the engines; raises WeightUpdateError naming those that cannot be used."""

    def update(self, pieces: Iterable[Piece], version: int) -> dict[str, float]:
        """Bring the engines to this version; returns timings. Raises WeightUpdateError naming who is at fault."""

    def checksums(self) -> list[dict[str, str]]:
        """Per engine: Hugging Face name -> checksum of the weights that it serves now."""

    def close(self) -> None:
        """Idempotent; never raises for an engine that is gone."""


def make_updater(config: WeightUpdateConfig) -> Updater:
    return DiskWeightUpdater(config) if config.disk_directory else WeightUpdater(config)
