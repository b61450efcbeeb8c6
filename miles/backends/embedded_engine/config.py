"""What the embedded engine is started with: one frozen dataclass and its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class EngineConfig:
    """Start-up configuration; nothing changes it afterwards."""

    model_path: str
    """Directory with config.json, *.safetensors and (for text) tokenizer.json."""
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "float32"
    device: str | None = None
    """"cpu" or "cuda"; None = cuda where there is one."""
    max_running_requests: int = 256
    """Requests that decode side by side; more wait in line."""
    max_queued_requests: int = 16384
    """Requests known to the server, running or waiting; above it /generate answers 503."""
    max_total_tokens: int | None = None
    """KV cache in tokens; None = what fits in a quarter of the free host memory (60 % of a GPU's)."""
    max_prefill_tokens: int = 8192
    """Prompt tokens computed in one step; a longer prompt is computed alone."""
    context_length: int | None = None
    """Prompt plus output, in tokens; None = the model's max_position_embeddings."""
    weight_version: str = "default"
    random_seed: int = 0
    """Seeds the requests that bring no sampling_seed of their own."""
    served_model_name: str | None = None
    """None = model_path."""
    weight_update_timeout: float = 60.0
    """Seconds that joining a weight group, or receiving one bucket, may take."""
    health_timeout: float = 20.0
    """Seconds that /health_generate waits for its token before it answers 503."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "max_queued_requests", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("max_total_tokens", "context_length"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 2, got {value}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.device is not None and self.device not in DEVICES:
            raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {self.device!r}")


def parse_config(argv: list[str] | None = None) -> EngineConfig:
    """The configuration that the command line `argv` asks for; exits with a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m miles.backends.embedded_engine",
        description="A small inference server (torch + transformers) with SGLang's HTTP contract.",
    )
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    parser.add_argument("--model-path", required=True, help="Hugging Face model directory")
    for name, kind, meaning in (
        ("host", str, "address to listen on"),
        ("port", int, "port to listen on"),
        ("max_running_requests", int, "requests that decode side by side"),
        ("max_queued_requests", int, "requests known at a time; more are refused with 503"),
        ("max_total_tokens", int, "KV cache size in tokens; default: from the free memory"),
        ("max_prefill_tokens", int, "prompt tokens computed in one step"),
        ("context_length", int, "prompt + output tokens; default: the model's max_position_embeddings"),
        ("weight_version", str, "version label of the initial weights"),
        ("random_seed", int, "seed for requests without a sampling_seed"),
        ("served_model_name", str, "name reported by /model_info; default: the model path"),
        ("weight_update_timeout", float, "seconds that one step of a weight update may take"),
        ("health_timeout", float, "seconds that /health_generate waits"),
        ("log_level", str, "logging level"),
    ):
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=defaults[name], help=meaning)
    parser.add_argument("--dtype", choices=DTYPES, default=defaults["dtype"])
    parser.add_argument("--device", choices=DEVICES, default=None, help="default: cuda where there is one")
    try:
        return EngineConfig(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
