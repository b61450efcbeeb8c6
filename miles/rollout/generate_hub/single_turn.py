"""One prompt, one answer: the generate function that runs where none is chosen."""

from __future__ import annotations

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    compute_routing_headers,
    router_url,
    update_sample_from_response,
)
from miles.utils.http_utils import post
from miles.utils.types import Sample


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Answer `input.sample` in place with one request.

    A sample that already has a part of its answer (an aborted one) goes on from its tokens, with what is left of
    `max_new_tokens`. Raises ValueError where the sample is neither PENDING nor ABORTED.
    """
    args, sample = input.args, input.sample
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(f"sample {sample.index} cannot be generated: its status is {sample.status}")

    prompt_ids = compute_prompt_ids_from_sample(input.state, sample)
    sampling_params = dict(input.sampling_params)
    input_ids = prompt_ids
    written = len(sample.tokens) - len(prompt_ids)
    if written > 0:
        input_ids = list(sample.tokens)
        if sampling_params["max_new_tokens"] is not None:
            sampling_params["max_new_tokens"] -= written

    payload, halt_status = compute_request_payload(
        args, input_ids, sampling_params, sample.multimodal_inputs, evaluation=input.evaluation
    )
    if payload is None:
        assert halt_status is not None
        sample.tokens = input_ids
        sample.rollout_log_probs = sample.rollout_log_probs or []
        sample.status = halt_status
        return GenerateFnOutput(samples=sample)

    output = await post(router_url(args), payload, headers=compute_routing_headers(args, sample))
    await update_sample_from_response(args, sample, payload, output)
    return GenerateFnOutput(samples=sample)
