"""Small checkpoint sets on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.utils import checkpoint_set

if TYPE_CHECKING:
    from pathlib import Path


def make_set(root: Path, rollout_id: int, **record: Any) -> Path:
    """A set of two small files, as the trainer writes it."""
    directory = checkpoint_set.set_path(root, rollout_id)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights %d" % rollout_id)
    staged = checkpoint_set.staged_rollout_path(root, rollout_id)
    staged.write_text("{}", encoding="utf-8")
    checkpoint_set.take_rollout_part(staged, directory)
    checkpoint_set.write_record(directory, {"rollout_id": rollout_id, **record})
    checkpoint_set.write_pointer(root, rollout_id)
    return directory
