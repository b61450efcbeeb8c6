"""Weight updates through files, for engines that cannot join a group with the trainer.

    gather (all trainer ranks) -> files of the new version (unchanged ones are links) -> pause -> every engine reads
    them (POST /update_weights_from_disk), side by side -> continue -> versions that nobody reads any more are removed

Writing happens before the pause. An engine has the new version or the one before it, and never a mixture of its own
making; after a failure the engines stay paused, since some may have the new one, until an update brings all of them to
one version. Engines read the directory under the path under which it is written.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from miles.backends.megatron_utils.engine_client import EngineClient, on_all, raise_blamed_on, silent_engines
from miles.backends.megatron_utils.weight_bracket import Bracket
from miles.backends.megatron_utils.weight_update import WeightUpdateConfig, engine_checksums
from miles.backends.megatron_utils.weight_versions import WeightVersions

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from miles.backends.megatron_utils.wire import Piece

logger = logging.getLogger(__name__)


class DiskWeightUpdater:
    """Used by trainer rank 0 only, from one thread."""

    def __init__(self, config: WeightUpdateConfig) -> None:
        if config.disk_directory is None:
            raise ValueError("updates through files need a directory")
        self._config = config
        self._versions = WeightVersions(config.disk_directory, source=config.source)
        self._engines: list[EngineClient] = []

    @property
    def engines(self) -> list[EngineClient]:
        return list(self._engines)

    def connect(self, engine_urls: list[str]) -> None:
        """Update these engines from now on. Raises WeightUpdateError naming those that do not answer."""
        if not engine_urls:
            raise ValueError("there are no engines to connect to")
        self._engines = [EngineClient(url.rstrip("/"), self._config.timeout_secs) for url in engine_urls]
        if silent := silent_engines(self._engines):
            raise_blamed_on(silent)

    def update(self, pieces: Iterable[Piece], version: int) -> dict[str, float]:
        """Write all weights, which `pieces` yields, and have every engine read them; returns timings in seconds.

        Raises:
            WeightUpdateError: an engine refused or did not answer; see the module docstring for what is left behind.
            OSError: a file could not be written; the engines have not heard of the update.
        """
        if not self._engines:
            raise RuntimeError("connect() to the engines before updating their weights")
        start = time.perf_counter()
        directory = self._versions.write(pieces, version, dtype=self._config.dtype)
        written = time.perf_counter()
        logger.info(
            "weight version %d is in %s after %.3f s (%d bytes are new)",
            version,
            directory,
            written - start,
            self._versions.bytes_written,
        )
        bracket = Bracket(
            self._engines,
            pause_mode=self._config.pause_mode,
            flush_timeout_secs=self._config.flush_timeout_secs,
            announced=False,
        )
        try:
            bracket.open()
            bracket.weights_touched = True
            transfer_start = time.perf_counter()
            on_all(self._engines, lambda engine: self._load(engine, directory, version))
            transfer_seconds = time.perf_counter() - transfer_start
            bracket.close()
        except RuntimeError as error:
            silent = silent_engines(self._engines)
            bracket.abandon([engine for engine in self._engines if engine not in silent])
            if silent:
                raise_blamed_on(silent, error)
            raise
        self._versions.prune(version)
        return {
            "perf/update_weights_time": time.perf_counter() - start,
            "perf/weight_update_pause_seconds": bracket.paused_seconds,
            "perf/weight_update_transfer_seconds": transfer_seconds,
            "perf/update_weights_bytes": float(self._versions.bytes_written),
        }

    def checksums(self) -> list[dict[str, str]]:
        """Per engine: Hugging Face name -> checksum of the weights that it serves now."""
        return engine_checksums(self._engines)

    def close(self) -> None:
        """The files stay: an engine may be reading them."""

    def _load(self, engine: EngineClient, directory: Path, version: int) -> None:
        engine.post(
            "/update_weights_from_disk",
            {
                "model_path": str(directory),
                "weight_version": str(version),
                "abort_all_requests": False,
                "flush_cache": self._config.pause_mode != "in_place",
            },
        )
