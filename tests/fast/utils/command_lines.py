"""A small valid command line, and the files that it names, for tests of flags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.utils.arguments import parse_args

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

HF_CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class CommandLine:
    """Flags that parse, with two trainer ranks, in a directory of their own."""

    directory: Path
    checkpoint: Path
    prompts: Path

    @staticmethod
    def create(directory: Path) -> CommandLine:
        checkpoint = directory / "model"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(HF_CONFIG))
        (checkpoint / "tokenizer.json").write_text("{}")
        (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        prompts = directory / "prompts.jsonl"
        prompts.write_text('{"input": "1+1=", "label": "2"}\n')
        return CommandLine(directory, checkpoint, prompts)

    def argv(self, *flags: str, without: tuple[str, ...] = ()) -> list[str]:
        """The base flags, then `flags`; `without` names base flags to leave out."""
        base = {
            "--rollout-engine": "embedded",
            "--hf-checkpoint": str(self.checkpoint),
            "--prompt-data": str(self.prompts),
            "--num-rollout": "3",
            "--rollout-batch-size": "4",
            "--n-samples-per-prompt": "4",
            "--rollout-max-response-len": "16",
            "--actor-num-gpus-per-node": "2",
            "--runs-dir": str(self.directory / "runs"),
        }
        words = [word for flag, value in base.items() if flag not in without for word in (flag, value)]
        return [*words, *flags]

    def parse(self, *flags: str, without: tuple[str, ...] = (), **options: Any) -> Namespace:
        return parse_args(argv=self.argv(*flags, without=without), **options)
