"""Makes everything that the quickstart reads: the base model and the prompts. A second call finds them and returns.

    python -m examples.quickstart.prepare --out examples/quickstart/data

    data/
      base_model/      a Hugging Face checkpoint
      train.jsonl      prompts of the training run
      eval.jsonl       held-out prompts
      prepare.json     what it was made from, and how good the base model is

Written to a temporary directory beside ``--out`` and renamed, so that a half-made one is never used.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from examples.quickstart import make_base_model, make_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = "prepare.json"


def prepare(out_dir: str | Path, *, steps: int = 1000) -> Path:
    """Make ``out_dir`` if it does not hold exactly what this code makes; return it.

    Several calls at once are safe: one makes it, the others wait. The base model takes ``steps`` supervised steps
    (about 20 s on one core for the default).
    """
    out_dir = Path(out_dir).absolute()
    config = make_base_model.BaseModelConfig(steps=steps)
    key = _key(config)
    if _made_from(out_dir) == key:
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(out_dir.with_name(f".{out_dir.name}.lock")):
        if _made_from(out_dir) != key:
            _make(out_dir, config, key)
    return out_dir


def _make(out_dir: Path, config: make_base_model.BaseModelConfig, key: str) -> None:
    print(f"Making the base model and the prompts in {out_dir} (once, under a minute) ...", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        make_prompts.make_prompts(made)
        accuracies = make_base_model.make_base_model(made / "base_model", config)
        record = {"key": key, "base_model": dataclasses.asdict(config), **accuracies}
        (made / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if out_dir.exists():
            out_dir.rename(Path(scratch) / "old")
        made.rename(out_dir)
    print(
        f"The base model sorts {accuracies['accuracy_sampled']:.0%} of unseen digits at temperature 1 "
        f"({accuracies['accuracy_greedy']:.0%} greedily); made in {time.monotonic() - started:.0f} s.",
        flush=True,
    )


def _key(config: make_base_model.BaseModelConfig) -> str:
    """Changes when the settings or the code that makes the files change."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name in ("make_base_model.py", "make_prompts.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def _made_from(out_dir: Path) -> str | None:
    try:
        record: dict[str, str] = json.loads((out_dir / RECORD).read_text(encoding="utf-8"))
        return record.get("key")
    except (OSError, ValueError):  # absent or unreadable: make it anew
        return None


@contextlib.contextmanager
def _only_one(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="directory to make")
    parser.add_argument("--steps", type=int, default=1000, help="supervised steps of the base model")
    options = parser.parse_args()
    prepare(options.out, steps=options.steps)


if __name__ == "__main__":
    main()
