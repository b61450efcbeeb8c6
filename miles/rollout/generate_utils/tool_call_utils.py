"""Tools in a conversation: finding calls in an answer, running them, and appending what they returned.

A call is written the way that most open models write it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles.utils.types import Sample

    ExecuteTool = Callable[[str, dict[str, Any]], Awaitable[str]]
    ToolCallParser = Callable[[str], list["ToolCall"]]

_TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_CALL_ID = "call_{:08d}"


@dataclass(frozen=True)
class ToolCall:
    """One call that a model asks for."""

    name: str
    arguments: dict[str, Any]


def parse_json_tool_calls(known_tools: frozenset[str], text: str) -> list[ToolCall]:
    """The calls of known tools in `text`, in order. What is malformed or unknown is no call: the model reads on."""
    calls = []
    for match in _TAGGED_CALL.finditer(text):
        try:
            content = json.loads(match[1])
        except ValueError:
            continue
        if not isinstance(content, dict) or content.get("name") not in known_tools:
            continue
        arguments = content.get("arguments", content.get("parameters", {}))
        if isinstance(arguments, dict):
            calls.append(ToolCall(content["name"], arguments))
    return calls


_PARSERS: dict[str, Callable[[frozenset[str], str], list[ToolCall]]] = {
    "hermes": parse_json_tool_calls,
    "qwen": parse_json_tool_calls,
    "qwen25": parse_json_tool_calls,
    "qwen3": parse_json_tool_calls,
}


def create_tool_call_parser(tool_specs: list[dict[str, Any]], tool_call_parser: str | None) -> ToolCallParser:
    """A function from an answer's text to its tool calls. Raises ValueError for a parser that does not exist."""
    name = tool_call_parser or "qwen"
    if name not in _PARSERS:
        raise ValueError(f"--generate-tool-call-parser {name!r} is unknown; known: {', '.join(sorted(_PARSERS))}")
    known = frozenset(spec.get("function", spec)["name"] for spec in tool_specs)
    parser = _PARSERS[name]
    return lambda text: parser(known, text)


async def execute_tool_calls(tool_calls: list[ToolCall], execute_one: ExecuteTool) -> list[dict[str, Any]]:
    """Run the calls one after the other; their results as messages of the role `tool`.

    Raises ValueError where the user's function returns something else than text.
    """
    messages = []
    for i, call in enumerate(tool_calls):
        result: Any = execute_one(call.name, call.arguments)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, str):
            raise ValueError(
                f"--generate-execute-tool-function-path {getattr(execute_one, '__qualname__', execute_one)} "
                f"must return text, got {type(result).__name__}: {result!r:.100}"
            )
        messages.append({"role": "tool", "tool_call_id": _CALL_ID.format(i), "name": call.name, "content": result})
    return messages


def tokenize_tool_responses(messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """The token ids that the chat template puts between an assistant's answer and the next one.

    The template is rendered with and without the tool messages behind a dummy turn; the difference is what they add,
    independent of the conversation before.
    """
    calls = [
        {"id": m["tool_call_id"], "type": "function", "function": {"name": m["name"], "arguments": {}}}
        for m in messages
    ]
    dummy = [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    before = tokenizer.apply_chat_template(dummy, tools=None, tokenize=False, add_generation_prompt=False)
    after = tokenizer.apply_chat_template(dummy + messages, tools=None, tokenize=False, add_generation_prompt=True)
    if not after.startswith(before):
        raise ValueError("the chat template rewrites earlier turns when tool messages follow: it cannot be extended")
    return [int(i) for i in tokenizer.encode(after[len(before) :], add_special_tokens=False)]


def update_sample_with_tool_responses(sample: Sample, messages: list[dict[str, Any]], tokenizer: Any) -> None:
    """Append the tools' messages to the sample: loss mask 0, log-probability 0.0."""
    token_ids = tokenize_tool_responses(messages, tokenizer)
    count = len(token_ids)
    sample.tokens = [*sample.tokens, *token_ids]
    sample.loss_mask = [*(sample.loss_mask or [1] * sample.response_length), *([0] * count)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *([0.0] * count)]
    sample.response_length += count
    sample.response += tokenizer.decode(token_ids) if count else ""
