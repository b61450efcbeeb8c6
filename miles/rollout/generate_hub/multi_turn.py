"""Several turns with tools: answer, run the tools that the answer calls, append their results, answer again.

    prompt --> answer --> tool calls? --no--> done
                 ^             | yes
                 +-- results <-+          at most --generate-max-turns answers

The whole trajectory is one training sequence; what the tools returned has loss mask 0.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    compute_routing_headers,
    router_url,
    update_sample_from_response,
)
from miles.rollout.generate_utils.tool_call_utils import (
    create_tool_call_parser,
    execute_tool_calls,
    update_sample_with_tool_responses,
)
from miles.utils.http_utils import post
from miles.utils.misc import load_function
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """The trajectory of a copy of `input.sample`. Raises ValueError with `--partial-rollout`."""
    args, tokenizer = input.args, input.state.tokenizer
    if getattr(args, "partial_rollout", False):
        raise ValueError("--partial-rollout: a trajectory with tools cannot be continued; leave the flag out")
    sample = copy.deepcopy(input.sample)
    tool_specs, execute_tool = _tools(args)
    parse_tool_calls = create_tool_call_parser(tool_specs, getattr(args, "generate_tool_call_parser", None))
    input_ids = compute_prompt_ids_from_sample(input.state, sample, tools=tool_specs)
    headers = compute_routing_headers(args, sample)

    for _ in range(getattr(args, "generate_max_turns", 16)):
        payload, halt_status = compute_request_payload(
            args, input_ids, _remaining(input.sampling_params, sample), evaluation=input.evaluation
        )
        if payload is None:
            assert halt_status is not None
            sample.tokens, sample.status = input_ids, halt_status
            break
        output = await post(router_url(args), payload, headers=headers)
        await update_sample_from_response(args, sample, payload, output, update_loss_mask=True)
        if sample.status in (Sample.Status.ABORTED, Sample.Status.TRUNCATED):
            break
        tool_calls = parse_tool_calls(output["text"])
        if not tool_calls:
            break
        messages = await execute_tool_calls(tool_calls, execute_tool)
        update_sample_with_tool_responses(sample, messages, tokenizer)
        input_ids = list(sample.tokens)
    return GenerateFnOutput(samples=sample)


def _remaining(sampling_params: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """`max_new_tokens` bounds the whole response: what earlier turns and tools have used is gone."""
    limit = sampling_params["max_new_tokens"]
    return {**sampling_params, "max_new_tokens": None if limit is None else limit - sample.response_length}


def _tools(args: Namespace) -> tuple[list[dict[str, Any]], Any]:
    specs_path = getattr(args, "generate_tool_specs_path", None)
    execute_path = getattr(args, "generate_execute_tool_function_path", None)
    for flag, path in (
        ("--generate-tool-specs-path", specs_path),
        ("--generate-execute-tool-function-path", execute_path),
    ):
        if not path:
            raise ValueError(f"{flag} is not set: multi_turn.generate needs the tools and the function that runs them")
    specs: Any = load_function(specs_path)
    specs = specs() if callable(specs) else specs
    if not isinstance(specs, list):
        raise ValueError(f"--generate-tool-specs-path {specs_path} must be a list of tools, got {specs!r:.100}")
    return specs, load_function(execute_path)


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--generate-max-turns", type=int, default=16, help="Most answers of the model in one trajectory."
    )
    parser.add_argument(
        "--generate-tool-specs-path", type=str, default=None, help="Dotted path of the list of tool specifications."
    )
    parser.add_argument(
        "--generate-tool-call-parser",
        type=str,
        default=None,
        help="How tool calls are written: qwen (default) or hermes.",
    )
    parser.add_argument(
        "--generate-execute-tool-function-path",
        type=str,
        default=None,
        help="Dotted path of `async (name, arguments) -> str`, which runs one tool call.",
    )


generate.add_arguments = _add_arguments  # type: ignore[attr-defined]
