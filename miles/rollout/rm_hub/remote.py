"""A reward server: POST {prompt, response, label} to `--rm-url`, which answers with the reward as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.utils.http_utils import post

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.types import Sample


async def remote_rm(args: Namespace, sample: Sample, response: str | None = None) -> Any:
    """The server's answer for one sample. `response` stands in for the sample's own.

    Retried like a generation request; raises HttpRequestError when that did not help, ValueError without `--rm-url`.
    """
    url = getattr(args, "rm_url", None)
    if not url:
        raise ValueError("--rm-type remote_rm needs the address of the reward server: set --rm-url")
    payload = {
        "prompt": sample.prompt,
        "response": sample.response if response is None else response,
        "label": sample.label,
    }
    return await post(url, payload)
