"""A tiny random Qwen3 with a character-level tokenizer, and what the engine should say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from miles.backends.embedded_engine.kv_cache import KVCache
from miles.backends.embedded_engine.model import EngineModel, load_model
from miles.backends.embedded_engine.random_numbers import seed_state
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import SamplingParams
from miles.backends.embedded_engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

VOCAB_SIZE = 97
CONTEXT_LENGTH = 512
EOS_ID = 1


def write_model(directory: Path, seed: int = 0, architecture: str = "Qwen3ForCausalLM", **overrides: Any) -> Path:
    """A model directory with weights large enough that the distribution is far from uniform."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": True,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.25,
    } | overrides
    torch.manual_seed(seed)
    config, model_class = _classes(architecture)
    model_class(config(**settings)).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def _classes(architecture: str) -> tuple[Any, Any]:
    import transformers

    family = architecture.removesuffix("ForCausalLM")
    return getattr(transformers, f"{family}Config"), getattr(transformers, architecture)


def write_tokenizer(directory: Path) -> None:
    """One token for each printable ASCII character; 0 is <pad>, 1 is <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = [chr(code) for code in range(32, 127)]
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def char_ids(text: str) -> list[int]:
    return [ord(character) - 30 for character in text]


def char_text(ids: Sequence[int]) -> str:
    return "".join(chr(token + 30) for token in ids if token > 1)


def random_weights(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Other weights for `model`, about as large as its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


def hugging_face(directory: Path, weights: Mapping[str, torch.Tensor] | None = None) -> Any:
    """The plain model of the library, with the directory's weights or these."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if weights is not None:
        for name, parameter in model.named_parameters():
            parameter.data = weights[name]
    return model


@torch.no_grad()
def full_forward_logprobs(
    model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """The log-prob of each output token, from one forward pass over the whole sequence."""
    ids = torch.tensor([[*prompt, *output]])
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(list(output))[:, None])[:, 0].tolist()


def make_request(prompt: Sequence[int], rid: str = "r", *, seed: int = 0, **fields: Any) -> Request:
    """A request that does not stop at the model's end tokens unless `end_ids` says so."""
    params = SamplingParams(**{key: value for key, value in fields.items() if key in SamplingParams.__annotations__})
    rest = {key: value for key, value in fields.items() if key not in SamplingParams.__annotations__}
    return Request(
        rid,
        list(prompt),
        params,
        max_new_tokens=16 if params.max_new_tokens is None else params.max_new_tokens,
        end_ids=rest.pop("end_ids", params.stop_token_ids),
        seed_state=seed_state(seed),
        return_logprob=True,
        **rest,
    )


def grow(request: Request, tokens: Sequence[int]) -> None:
    """Append output tokens as if they had been generated."""
    for token in tokens:
        request.append(token, 0.0, "default")


def make_scheduler(
    directory: Path,
    *,
    max_running_requests: int = 64,
    max_total_tokens: int = 16384,
    max_prefill_tokens: int = 8192,
    context_length: int | None = None,
) -> Scheduler:
    model = load_model(str(directory), dtype=torch.float32, device=torch.device("cpu"), context_length=context_length)
    return scheduler_of(
        model,
        max_running_requests=max_running_requests,
        max_total_tokens=max_total_tokens,
        max_prefill_tokens=max_prefill_tokens,
    )


def scheduler_of(
    model: EngineModel, *, max_running_requests: int, max_total_tokens: int, max_prefill_tokens: int
) -> Scheduler:
    cache = KVCache(model.info.kv_shape, context_length=model.info.context_length, max_total_tokens=max_total_tokens)
    return Scheduler(
        model,
        cache,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        version="default",
    )


def run_until_done(scheduler: Scheduler, *, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        if not scheduler.can_step:
            return
        scheduler.step()
    raise AssertionError(f"still {scheduler.num_running} running and {scheduler.num_waiting} waiting")
