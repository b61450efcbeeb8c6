from __future__ import annotations

import pytest

from miles.rollout.generate_utils.tool_call_utils import (
    ToolCall,
    create_tool_call_parser,
    tokenize_tool_responses,
)
from tests.fast.rollout.engine_stub import CharTokenizer

SPECS = [{"type": "function", "function": {"name": "add"}}, {"name": "sub"}]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ToolCall("add", {"a": 1})]),
        (
            '<tool_call>{"name": "add"}</tool_call>x<tool_call>{"name": "sub", "parameters": {"b": 2}}</tool_call>',
            [ToolCall("add", {}), ToolCall("sub", {"b": 2})],
        ),
        ("<tool_call>{broken</tool_call>", []),
        ("<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": "other"}</tool_call>', []),
        ('<tool_call>{"name": "add", "arguments": "text"}</tool_call>', []),
        ('<tool_call>{"name": "add"}', []),
    ],
)
def test_calls_of_known_tools_are_found_and_the_rest_is_text(text, calls):
    assert create_tool_call_parser(SPECS, "qwen25")(text) == calls


def test_a_template_that_rewrites_earlier_turns_is_refused():
    class Rewriting(CharTokenizer):
        def apply_chat_template(self, messages, **keywords):
            return f"{len(messages)} messages: " + super().apply_chat_template(messages, **keywords)

    messages = [{"role": "tool", "tool_call_id": "c", "name": "add", "content": "3"}]
    assert tokenize_tool_responses(messages, CharTokenizer()) == [ord(c) for c in "<tool>3<assistant>"]
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        tokenize_tool_responses(messages, Rewriting())
