"""One call of an engine's `/generate`, in pieces: prompt ids, headers, payload, and reading the answer.

    sample --compute_prompt_ids_from_sample--> ids --compute_request_payload--> payload --POST--> output
       ^                                                                                            |
       +------------------------------ update_sample_from_response ---------------------------------+

The token ids that the engine returns are appended as they are: text is never tokenised a second time, so the trainer
scores exactly the tokens that were sampled.
"""

from __future__ import annotations

import base64
import uuid
from typing import TYPE_CHECKING, Any

from miles.rollout.generate_utils.attempts import answered_by
from miles.rollout.generate_utils.request_ids import with_request_id
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import SampleStatus

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
_ROUTING_KEY_POLICIES = ("consistent_hashing", "manual")


def router_url(args: Namespace, endpoint: str = "/generate") -> str:
    """The address of `endpoint` on the run's router."""
    ip = getattr(args, "sglang_router_ip", None)
    port = getattr(args, "sglang_router_port", None)
    if not ip or not port:
        raise ValueError(f"the router's address is not known: --sglang-router-ip {ip}, --sglang-router-port {port}")
    return address_url(ip, port, endpoint)


def address_url(ip: str, port: int, endpoint: str) -> str:
    """`http://ip:port/endpoint`, with an IPv6 address in brackets."""
    host = f"[{ip}]" if ":" in ip and not ip.startswith("[") else ip
    return f"http://{host}:{port}{endpoint}"


def compute_prompt_ids_from_sample(
    state: GenerateState, sample: Sample, tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """The prompt's token ids.

    A text prompt is encoded as it is, without special tokens. A list of messages goes through the chat template, with
    `tools` or else `metadata["tools"]`. Where the sample has multimodal inputs the processor makes the ids, and what
    else it returns becomes `sample.multimodal_train_inputs`.
    """
    text = prompt_text(state.args, state.tokenizer, sample, tools)
    if sample.multimodal_inputs and state.processor is not None:
        encoded = dict(state.processor(text=text, **sample.multimodal_inputs))
        ids = [int(i) for i in encoded.pop("input_ids")[0]]
        encoded.pop("attention_mask", None)
        sample.multimodal_train_inputs = encoded or None
        return ids
    return [int(i) for i in state.tokenizer.encode(text, add_special_tokens=False)]


def prompt_text(args: Namespace, tokenizer: Any, sample: Sample, tools: list[dict[str, Any]] | None = None) -> str:
    """The prompt as text: itself, or its messages rendered by the chat template."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return str(
        tokenizer.apply_chat_template(
            sample.prompt,
            tools=tools or sample.metadata.get("tools") or None,
            tokenize=False,
            add_generation_prompt=True,
            **(getattr(args, "apply_chat_template_kwargs", None) or {}),
        )
    )


def policy_uses_routing_key(args: Namespace) -> bool:
    """Whether the router's policy sends requests with the same key to the same engine."""
    return getattr(args, "sglang_router_policy", None) in _ROUTING_KEY_POLICIES


def ensure_routing_key(args: Namespace, sample: Sample) -> None:
    """Give the sample a routing key of its own where the router's policy needs one and it has none."""
    if policy_uses_routing_key(args) and sample.routing_key is None:
        sample.routing_key = str(uuid.uuid4())


def compute_routing_headers(args: Namespace, sample: Sample) -> dict[str, str] | None:
    """The routing header of a request for `sample`; None where the policy needs none.

    Raises ValueError where the policy needs a key and the sample has none.
    """
    if not policy_uses_routing_key(args):
        return None
    if not sample.routing_key:
        raise ValueError(
            f"--sglang-router-policy {args.sglang_router_policy} needs a routing key, "
            f"but sample {sample.index} has routing_key={sample.routing_key!r}"
        )
    return {ROUTING_KEY_HEADER: sample.routing_key}


def compute_request_payload(
    args: Namespace,
    input_ids: list[int],
    sampling_params: dict[str, Any],
    multimodal_inputs: dict[str, Any] | None = None,
    *,
    evaluation: bool = False,
) -> tuple[dict[str, Any] | None, SampleStatus | None]:
    """The body of one `/generate` request, or None and the status with which the sample ends without one.

    `max_new_tokens` is cut to what the context has left (`--rollout-max-context-len`, for evaluation
    `--eval-max-context-len` where it is set); nothing left means (None, TRUNCATED). The caller's dictionary is not
    changed.

    Raises ValueError for a token id that the model does not have: it would end an SGLang server, and all its requests.
    """
    _check_token_ids(input_ids, getattr(args, "engine_vocab_size", None))
    max_new_tokens = sampling_params["max_new_tokens"]
    context = getattr(args, "rollout_max_context_len", None)
    if evaluation:
        context = getattr(args, "eval_max_context_len", None) or context
    if context is not None:
        room = context - len(input_ids)
        max_new_tokens = room if max_new_tokens is None else min(max_new_tokens, room)
    if max_new_tokens is not None and max_new_tokens <= 0:
        return None, Sample.Status.TRUNCATED

    payload: dict[str, Any] = {
        "input_ids": input_ids,
        "sampling_params": {**sampling_params, "max_new_tokens": max_new_tokens},
        "return_logprob": True,
        "return_routed_experts": bool(getattr(args, "use_rollout_routing_replay", False)),
        "return_indexer_topk": bool(getattr(args, "use_rollout_indexer_replay", False)),
    }
    images = (multimodal_inputs or {}).get("images")
    if images:
        from miles.utils.processing_utils import encode_image_for_rollout_engine

        payload["image_data"] = [encode_image_for_rollout_engine(image) for image in images]
    return with_request_id(payload), None


def _check_token_ids(input_ids: list[int], vocab_size: int | None) -> None:
    if vocab_size is not None and input_ids and not 0 <= min(input_ids) <= max(input_ids) < vocab_size:
        wrong = next(i for i in input_ids if not 0 <= i < vocab_size)
        raise ValueError(
            f"token id {wrong} is outside the model's vocabulary of {vocab_size}: the tokenizer, the chat template or "
            "the generate function does not fit --hf-checkpoint"
        )


async def update_sample_from_response(
    args: Namespace,
    sample: Sample,
    payload: dict[str, Any],
    output: dict[str, Any],
    update_loss_mask: bool = False,
) -> None:
    """Append one response to the sample: tokens, text, log-probabilities, status, weight versions and counters.

    An existing loss mask grows with 1s; `update_loss_mask` starts one (1s over what is there already). Raises
    ValueError where the engine returned tokens without log-probabilities.
    """
    meta_info = output["meta_info"]
    answered_by(meta_info)
    log_probs, tokens = _output_log_probs_and_tokens(output)

    if update_loss_mask and sample.loss_mask is None:
        sample.loss_mask = [1] * sample.response_length
    if sample.loss_mask is not None:
        sample.loss_mask = [*sample.loss_mask, *([1] * len(tokens))]
    sample.tokens = [*(sample.tokens or payload["input_ids"]), *tokens]
    sample.response_length += len(tokens)
    sample.response += output.get("text") or ""
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *log_probs]
    sample.update_from_meta_info(args, meta_info)

    if getattr(args, "use_rollout_routing_replay", False):
        sample.rollout_routed_experts = get_routed_experts_from_response(args, sample, output)
    if getattr(args, "use_rollout_indexer_replay", False):
        sample.rollout_indexer_topk = get_indexer_topk_from_response(args, sample, output)


def _output_log_probs_and_tokens(output: dict[str, Any]) -> tuple[list[float], list[int]]:
    entries = output["meta_info"].get("output_token_logprobs")
    if entries:
        return [entry[0] for entry in entries], [entry[1] for entry in entries]
    if output.get("output_ids"):
        raise ValueError(
            f"the engine returned {len(output['output_ids'])} tokens without meta_info.output_token_logprobs "
            f"(finish_reason {output['meta_info'].get('finish_reason')})"
        )
    return [], []


def get_routed_experts_from_response(args: Namespace, sample: Sample, output: dict[str, Any]) -> Any:
    """The experts that the engine chose, int32 [len(tokens) - 1, num_layers, moe_router_topk]; None where absent."""
    return _decode_replay(sample, output["meta_info"].get("routed_experts"), args.num_layers, args.moe_router_topk)


def get_indexer_topk_from_response(args: Namespace, sample: Sample, output: dict[str, Any]) -> Any:
    """The indexer's choices, int32 [len(tokens) - 1, num_layers, top k]; None where absent."""
    return _decode_replay(sample, output["meta_info"].get("indexer_topk"), args.num_layers, -1)


def _decode_replay(sample: Sample, encoded: str | None, num_layers: int, top_k: int) -> Any:
    if encoded is None:
        return None
    import numpy as np

    flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    return flat.reshape(len(sample.tokens) - 1, num_layers, top_k)
