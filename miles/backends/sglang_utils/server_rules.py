"""What must hold before SGLang servers are started: the package, sizes, and flags that miles' own calls cannot meet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.utils.devices import cuda_device_present, sglang_installed
from miles.utils.flag_rules import flag_name, require

if TYPE_CHECKING:
    from argparse import Namespace

_NCCL_PACKAGES = "nvidia-nccl-cu"
_FIND_SGLANG = f"""
import importlib.util, sys
from importlib.metadata import distributions
if importlib.util.find_spec("sglang") is None:
    sys.exit(1)
versions = (d.version for d in distributions() if (d.metadata["Name"] or "").startswith("{_NCCL_PACKAGES}"))
print(next(versions, ""))
"""
_FIND_SECS = 60

# Values that would make a server which miles cannot talk to, or cannot send weights to.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "sglang_pp_size": ((None, 1), "SGLang gives the stages of a pipeline the same rank in a weight update"),
    "sglang_dp_size": ((None, 1), "SGLang updates the weights of one replica only; use several engines"),
    "sglang_disaggregation_mode": ((None, "null"), "separate prefill servers are not available"),
    "sglang_api_key": ((None,), "the run's own calls carry no key"),
    "sglang_admin_api_key": ((None,), "the run's own calls carry no key"),
    "sglang_ssl_certfile": ((None,), "the run talks plain HTTP to its engines"),
    "sglang_ssl_keyfile": ((None,), "the run talks plain HTTP to its engines"),
    "sglang_grpc_mode": ((False, None), "the run talks HTTP to its engines"),
    "sglang_smg_grpc_mode": ((False, None), "the run talks HTTP to its engines"),
    "sglang_skip_tokenizer_init": ((False, None), "stop texts need the engine's tokenizer"),
}


def validate_servers(args: Namespace) -> None:
    """Raise ValueError unless SGLang servers can be started with these flags."""
    _require_sglang(args.sglang_python)
    for dest, (allowed, why) in _REFUSED.items():
        value = getattr(args, dest, None)
        require(value in allowed, f"{flag_name(dest)} {value} is refused: {why}. Instead: drop the flag")
    _require_sizes(args)


def _require_sglang(python: str | None) -> None:
    if python is None:
        require(
            sglang_installed(),
            "--rollout-engine sglang: the package sglang is not installed here. Instead: install it, or name the "
            "Python of an environment that has it with --sglang-python, or use --rollout-engine embedded",
        )
        return
    require(
        shutil.which(python) is not None and os.access(shutil.which(python) or "", os.X_OK),
        f"--sglang-python {python}: there is no such program",
    )
    found = subprocess.run(
        [python, "-c", _FIND_SGLANG], capture_output=True, text=True, timeout=_FIND_SECS, check=False
    )
    said = f" ({found.stderr.strip().splitlines()[-1]})" if found.stderr.strip() else ""
    require(found.returncode == 0, f"--sglang-python {python}: it lacks the package sglang{said}")
    theirs, own = found.stdout.strip(), nccl_version()
    require(
        not (cuda_device_present() and theirs and own) or theirs == own,
        f"--sglang-python {python}: its NCCL is {theirs} and that of the trainer {own}, and NCCL refuses a group of "
        "two versions, which a weight update is. Instead: the same version of torch in both environments, or of the "
        "package nvidia-nccl-cu*; or --update-weight-transfer-mode disk-delta",
    )


def nccl_version() -> str:
    """Of the package that torch's NCCL comes from here; empty where there is none, as beside a torch without CUDA."""
    versions = (d.version for d in distributions() if (d.metadata["Name"] or "").startswith(_NCCL_PACKAGES))
    return next(versions, "")


def _require_sizes(args: Namespace) -> None:
    """The sizes of one engine, of its machines and of the model go into each other."""
    ranks, per_node = args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    given = getattr(args, "sglang_tp_size", None)
    require(
        given is None or given == ranks,
        f"--sglang-tp-size {given} is not --rollout-num-gpus-per-engine {ranks}, which sets it. Instead: drop it",
    )
    for flag, size in (
        ("--rollout-num-gpus-per-engine", ranks),
        ("--eval-num-gpus-per-engine", getattr(args, "eval_num_gpus_per_engine", None) or 1),
    ):
        require(
            size <= per_node or size % per_node == 0,
            f"{flag} {size} does not divide into nodes of --num-gpus-per-node {per_node}",
        )
        heads = _attention_heads(args.hf_checkpoint)
        require(
            heads is None or heads % size == 0,
            f"{flag} {size} does not divide the {heads} attention heads of {args.hf_checkpoint}",
        )


def _attention_heads(checkpoint: str | None) -> int | None:
    return config_number(checkpoint, "num_attention_heads")


def config_number(checkpoint: str | None, key: str) -> int | None:
    """An integer of the checkpoint's config.json; None where it does not say."""
    try:
        config = json.loads((Path(str(checkpoint)) / "config.json").read_text(encoding="utf-8"))
        value = config.get(key, config.get("text_config", {}).get(key))
    except (OSError, ValueError, AttributeError):  # other rules tell what is wrong with the checkpoint
        return None
    return value if isinstance(value, int) else None
