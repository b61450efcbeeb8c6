"""Samples as JSON: everything that a sample may hold, and nothing that could run code when it is read.

Plain data is written as it is; arrays, bytes, tuples and the sample's own value classes as `{"__miles__": kind, ...}`.
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

from miles.utils.types import AdapterRef, RewardSpec, Sample

_KIND = "__miles__"


class SampleCodecError(ValueError):
    """A sample holds a value that this format does not know."""


def encode_sample(sample: Sample) -> dict[str, Any]:
    """The sample as JSON-ready data. Raises SampleCodecError naming the field that cannot be written."""
    return {
        name: _encode(value, f"sample {sample.index}: {name}")
        for name, value in sample.to_dict().items()
        if value is not None
    }


def decode_sample(data: dict[str, Any]) -> Sample:
    """The inverse of `encode_sample`."""
    return Sample.from_dict({name: _decode(value) for name, value in data.items()})


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
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
        return [_decode(item) for item in value]
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
