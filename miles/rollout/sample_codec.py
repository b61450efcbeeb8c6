"""Samples as JSON: everything that a sample may hold, and nothing that could run code when it is read.

    sample --hold--> its fields of this moment --encode_fields--> JSON-ready data --decode_sample--> sample
                                               --encode_prompt--> the same without the answer

Plain data is written as it is; arrays, bytes, tuples and the sample's own value classes as `{"__miles__": kind, ...}`.
What is held may be encoded later and in another thread: a field that is assigned anew meanwhile does not change it.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from miles.utils.types import ANSWER_FIELDS, AdapterRef, RewardSpec, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

Fields = dict[str, Any]
"""The attributes of a sample, by name."""

_KIND = "__miles__"
_PLAIN = frozenset((int, float, str, bool, type(None)))
_ANSWER_FIELDS = frozenset((*ANSWER_FIELDS, "status"))
_FIELDS = frozenset(field.name for field in fields(Sample))


class SampleCodecError(ValueError):
    """A sample holds a value that this format does not know."""


def hold(sample: Sample) -> Fields:
    """The sample's fields of now. Quick: the values themselves are shared."""
    return vars(sample).copy()


def encode_sample(sample: Sample) -> dict[str, Any]:
    """The sample as JSON-ready data. Raises SampleCodecError naming the field that cannot be written."""
    return encode_fields(vars(sample))


def encode_fields(held: Fields) -> dict[str, Any]:
    """As `encode_sample`."""
    return {name: _encode_field(held, name, value) for name, value in held.items() if value is not None}


def encode_prompt(held: Fields, own: Collection[str] = (), left_out: Callable[[str], None] | None = None) -> Fields:
    """The sample without its answer: PENDING where it was, else ABORTED, as a sample that starts over.

    User code may have put things into the metadata, or on the sample, that cannot be written, and that a new answer
    does not need: they are left out, and `left_out(why)` is called for each. What the prompt had from its data source,
    `own` by name, is no such thing. Raises SampleCodecError naming a field of the prompt that cannot be written.
    """
    is_pending = held["status"] is Sample.Status.PENDING
    data = {"status": (Sample.Status.PENDING if is_pending else Sample.Status.ABORTED).value}
    for name, value in held.items():
        if value is None or name in _ANSWER_FIELDS:
            continue
        try:
            data[name] = _encode_field(held, name, value)
        except SampleCodecError as error:
            if name == "metadata" and isinstance(value, dict):
                data[name] = _encode_saveable_items(held, value, own, left_out)
            elif name in _FIELDS or name in own:
                raise
            elif left_out is not None:
                left_out(str(error))
    return data


def unsaveable_names(sample: Sample) -> set[str]:
    """The entries of the metadata, and the attributes that are no fields, which cannot be written."""
    held = {name: value for name, value in vars(sample).items() if name not in _FIELDS}
    return {name for items in (held, sample.metadata) for name, value in items.items() if not _is_saveable(value)}


def decode_sample(data: dict[str, Any]) -> Sample:
    """The inverse of `encode_sample`."""
    return Sample.from_dict({name: _decode(value) for name, value in data.items()})


def _encode_saveable_items(
    held: Fields, items: dict[Any, Any], own: Collection[str], left_out: Callable[[str], None] | None
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in items.copy().items():
        try:
            data |= _encode({key: value}, _where(held, "metadata"))
        except SampleCodecError as error:
            if key in own:
                raise
            if left_out is not None:
                left_out(str(error))
    return data


def _is_saveable(value: Any) -> bool:
    try:
        _encode(value, "")
    except SampleCodecError:
        return False
    return True


def _encode_field(held: Fields, name: str, value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if name in ("spec_info", "prefix_cache_info"):
        return value.to_dict()
    if name == "status":
        return value.value
    return _encode(value, _where(held, name))


def _where(held: Fields, name: str) -> str:
    return f"sample {held.get('index')}: {name}"


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        if _PLAIN.issuperset(map(type, value)):  # tokens, log-probabilities
            return value.copy()
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        value = value.copy()  # in one step, whoever else changes it
        for key in value:
            if not isinstance(key, str):
                raise SampleCodecError(f"{where} has the key {key!r}, and only text keys can be saved")
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": _encode(list(value), where)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, AdapterRef):
        return {_KIND: "adapter", **asdict(value)}
    if isinstance(value, RewardSpec):
        return {_KIND: "reward_spec", **asdict(value)}
    return _encode_array(value, where)


def _encode_array(value: Any, where: str) -> dict[str, Any]:
    """numpy arrays and scalars, and torch tensors on the CPU, recognised without importing either library."""
    package = type(value).__module__.partition(".")[0]
    if package == "torch" and hasattr(value, "numpy"):
        kind, array = "tensor", value.detach().cpu().numpy()
    elif package == "numpy" and hasattr(value, "tobytes"):
        kind, array = "array", value
    else:
        raise SampleCodecError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which is not saved")
    if array.dtype.hasobject:
        raise SampleCodecError(f"{where} is an array of Python objects, which is not saved")
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {_KIND: kind, "dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return value if _PLAIN.issuperset(map(type, value)) else [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _decode(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(_decode(value["items"]))
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "adapter":
        return AdapterRef(name=value["name"], slot=value["slot"])
    if kind == "reward_spec":
        return RewardSpec(rm_type=value["rm_type"], custom_rm_path=value["custom_rm_path"])
    if kind in ("array", "tensor"):
        return _decode_array(value)
    raise SampleCodecError(f"unknown kind {kind!r}")


def _decode_array(value: dict[str, Any]) -> Any:
    import numpy as np

    array = (
        np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    )
    if value[_KIND] == "array":
        return array
    import torch

    return torch.from_numpy(array)
