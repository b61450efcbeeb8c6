"""Makes the model that the quickstart starts from: a tiny Qwen3 that sorts digits about three times in ten.

Reinforcement learning selects among the things that a model already does. So the base model is taught, by ordinary
supervised training, to answer in one of three ways, and nothing in the prompt says in which: ascending (the right one,
in a third of the data), descending, or a plain copy. Everything else is real: a Hugging Face checkpoint with a fast
tokenizer.

    prompt tokens      answer tokens
    5 2 9 1 4 >        1 2 4 5 9 <|endoftext|>
    no loss            cross-entropy
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from examples.quickstart.make_prompts import SEED, answer_of, problems, prompt_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

END = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
IGNORED = -100


@dataclass(frozen=True)
class BaseModelConfig:
    """What the base model is and how it is taught. The defaults are the quickstart's."""

    steps: int = 1000
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    right_answers: float = 0.33
    """Share of right answers in the training data; the other two kinds share the rest."""
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    intermediate_size: int = 128
    max_positions: int = 256
    seed: int = SEED


def make_tokenizer() -> Any:
    """A fast tokenizer of 98 tokens: the end token (also padding), the unknown token, newline and printable ASCII."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([END, UNKNOWN, *CHARACTERS])}
    # Without merges each character stays a token of its own.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(UNKNOWN, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        model_max_length=BaseModelConfig.max_positions,
        clean_up_tokenization_spaces=False,
    )


def make_model(config: BaseModelConfig, tokenizer: Any) -> Any:
    """A randomly initialised Qwen3 with tied embeddings, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def taught_answer(digits: str, rng: random.Random, right_answers: float) -> str:
    """Right with the given probability, else descending or the plain copy, half and half."""
    draw = rng.random()
    if draw < right_answers:
        return answer_of(digits)
    return answer_of(digits)[::-1] if draw < (1 + right_answers) / 2 else digits


def encode_batch(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> tuple[Any, Any]:
    """(prompt, answer) texts -> input ids and labels, both int64 [batch, longest], padded on the right.

    Labels are -100 on prompt and padding. The end token belongs to the answer.
    """
    import torch

    rows, labels = [], []
    for prompt, answer in pairs:
        prompt_ids = tokenizer.encode(prompt)
        answer_ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        rows.append(prompt_ids + answer_ids)
        labels.append([IGNORED] * len(prompt_ids) + answer_ids)
    width = max(map(len, rows))
    ids = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]
    targets = [row + [IGNORED] * (width - len(row)) for row in labels]
    return torch.tensor(ids), torch.tensor(targets)


def teach(model: Any, tokenizer: Any, config: BaseModelConfig) -> None:
    """Supervised training on mixed answers, in place."""
    import torch

    rng = random.Random(config.seed)
    stream = problems(rng, held_out=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / config.warmup_steps)
        digits = [next(stream) for _ in range(config.batch_size)]
        ids, labels = encode_batch(
            [(prompt_of(d), taught_answer(d, rng, config.right_answers)) for d in digits], tokenizer
        )
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def accuracy(model: Any, tokenizer: Any, problem_digits: Sequence[str], *, greedy: bool, seed: int = SEED) -> float:
    """Share of exactly right answers, greedy or sampled at temperature 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    right = 0
    with torch.inference_mode():
        # One batch for each prompt length, so that nothing needs padding on the left.
        for length in sorted({len(digits) for digits in problem_digits}):
            batch = [digits for digits in problem_digits if len(digits) == length]
            ids = torch.tensor([tokenizer.encode(prompt_of(digits)) for digits in batch])
            prompt_length = ids.shape[1]
            for _ in range(length + 1):  # the answer and its end token
                logits = model(input_ids=ids).logits[:, -1]
                if greedy:
                    token = logits.argmax(-1, keepdim=True)
                else:
                    token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
                ids = torch.cat([ids, token], dim=1)
            for digits, row in zip(batch, ids[:, prompt_length:].tolist(), strict=True):
                right += row == [*tokenizer.encode(answer_of(digits)), tokenizer.eos_token_id]
    return right / len(problem_digits)


def make_base_model(directory: Path, config: BaseModelConfig | None = None) -> dict[str, float]:
    """Write the checkpoint into ``directory`` and return its accuracies on held-out problems.

    The same bytes each time on one machine: one seed, one thread. The caller's random state and thread count come back.
    """
    import torch

    config = config or BaseModelConfig()
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        torch.set_num_threads(1)  # the order of additions must not depend on the number of cores
        try:
            tokenizer = make_tokenizer()
            model = make_model(config, tokenizer)
            teach(model, tokenizer, config)
            stream = problems(random.Random(config.seed + 1), held_out=True)
            held_out = [next(stream) for _ in range(512)]
            result = {
                "accuracy_sampled": accuracy(model, tokenizer, held_out, greedy=False),
                "accuracy_greedy": accuracy(model, tokenizer, held_out, greedy=True),
            }
        finally:
            torch.set_num_threads(threads)
    with _no_progress_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return result


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws one even for a single small file."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
