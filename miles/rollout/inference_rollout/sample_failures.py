"""How the answering of one sample fails without any user code being wrong, and what may be kept then. Pure functions.

A lost connection, an engine that is overloaded or restarts, a deadline, an abort: none is a reason to end a run or to
throw away what the sample's siblings have written. Anything else that is raised is a user's error and is not in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.utils.http_errors import HttpConnectionError, HttpStatusError, HttpTimeoutError
from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNANSWERED = (Sample.Status.ABORTED, Sample.Status.FAILED)


def is_transport_failure(error: BaseException) -> bool:
    """Whether a request failed, after the client's own retries, for a reason that another try may not meet.

    A broken connection, a timeout, 429 and 5xx are; other statuses say that the request itself is wrong. An engine that
    still holds an earlier try of the same request (400, duplicate request id) would take the sample under a new id.
    """
    if isinstance(error, HttpConnectionError | HttpTimeoutError):
        return True
    if not isinstance(error, HttpStatusError) or error.status is None:
        return False
    if error.status == 429 or error.status >= 500:
        return True
    return error.status == 400 and "duplicate request id" in error.body.lower()


def members(generated: Sample | list[Sample]) -> list[Sample]:
    """The samples that one prompt sample became."""
    return generated if isinstance(generated, list) else [generated]


def is_unanswered(generated: Sample | list[Sample]) -> bool:
    """Whether a sample of these was aborted or failed."""
    if isinstance(generated, Sample):
        return generated.status in _UNANSWERED
    return any(sample.status in _UNANSWERED for sample in generated)


def is_aborted(generated: Sample | list[Sample]) -> bool:
    """Whether a sample of these was aborted: such an answer is not rewarded."""
    if isinstance(generated, Sample):
        return generated.status is Sample.Status.ABORTED
    return any(sample.status is Sample.Status.ABORTED for sample in generated)


def mark_aborted(generated: Sample | list[Sample]) -> Sample | list[Sample]:
    """The samples, with those that failed marked ABORTED: the owner of the group generates it again."""
    for sample in members(generated):
        if sample.status is Sample.Status.FAILED:
            sample.status = Sample.Status.ABORTED
    return generated


def too_stale(samples: Iterable[Sample], current: int | None, limit: int | None) -> bool:
    """Whether one of the samples was begun under weights more than `limit` versions older than `current`.

    False where there is no limit, and for what carries no numeric version: that is judged elsewhere.
    """
    if current is None or limit is None:
        return False
    return any(current - version > limit for version in _oldest_versions(samples))


def _oldest_versions(samples: Iterable[Sample]) -> Iterator[int]:
    for sample in samples:
        version = sample.oldest_weight_version
        if version is not None:
            yield version


def reason_of(outcome: Any) -> str:
    """Why an attempt has not given an answer, in words: an error, or the samples that came back."""
    if isinstance(outcome, BaseException):
        return f"{type(outcome).__name__}: {outcome}"
    return "/".join(sorted({sample.status.value for sample in members(outcome) if sample.status in _UNANSWERED}))
