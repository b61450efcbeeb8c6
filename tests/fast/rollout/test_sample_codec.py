from __future__ import annotations

import json

import numpy as np
import pytest

from miles.rollout.sample_codec import SampleCodecError, decode_sample, encode_sample
from miles.utils.types import AdapterRef, RewardSpec, Sample, SpecInfo


def round_trip(sample: Sample) -> Sample:
    return decode_sample(json.loads(json.dumps(encode_sample(sample))))


def test_everything_a_sample_usually_holds_survives():
    sample = Sample(
        group_index=1,
        index=2,
        prompt=[{"role": "user", "content": "hi"}],
        tokens=[1, 2, 3],
        response="r",
        response_length=1,
        label={"answer": 4},
        reward={"acc": 0.5},
        loss_mask=[1],
        weight_versions=["3", "4"],
        rollout_log_probs=[-0.25],
        status=Sample.Status.ABORTED,
        metadata={"tuple": (1, "b"), "bytes": b"\x00\xff", "none": None, "nested": {"list": [1.5, True]}},
        adapter=AdapterRef("lora", 2),
        reward_spec=RewardSpec(rm_type="math"),
        routing_key="key",
        non_generation_time=0.5,
        spec_info=SpecInfo(1, 2, 3, 4),
    )
    sample.attribute_of_a_plugin = [1]
    restored = round_trip(sample)
    assert restored == sample
    assert restored.attribute_of_a_plugin == [1]


def test_arrays_survive_with_type_and_shape():
    experts = np.arange(6, dtype=np.int32).reshape(3, 2)
    restored = round_trip(Sample(rollout_routed_experts=experts, metadata={"scalar": np.float32(0.5)}))
    assert restored.rollout_routed_experts.dtype == np.int32
    assert (restored.rollout_routed_experts == experts).all()
    assert restored.metadata["scalar"] == 0.5


def test_tensors_survive():
    torch = pytest.importorskip("torch")
    restored = round_trip(Sample(multimodal_train_inputs={"pixels": torch.ones(2, 3)}))
    assert torch.equal(restored.multimodal_train_inputs["pixels"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"f": print}, r"sample 5: metadata\.f is a builtins\.builtin_function_or_method"),
        ({"l": [0, {1, 2}]}, r"sample 5: metadata\.l\[1\] is a builtins\.set"),
        ({3: 1}, r"sample 5: metadata has the key 3"),
        ({"o": np.array([print], dtype=object)}, "array of Python objects"),
    ],
)
def test_what_could_need_code_to_be_read_is_named_and_refused(metadata, message):
    with pytest.raises(SampleCodecError, match=message):
        encode_sample(Sample(index=5, metadata=metadata))


def test_an_unknown_kind_is_refused():
    with pytest.raises(SampleCodecError, match="unknown kind 'pickle'"):
        decode_sample({"metadata": {"__miles__": "pickle", "data": "x"}})


def test_version_spans_survive():
    sample = Sample(weight_version_spans=[[0, 2, "3"]])
    assert decode_sample(json.loads(json.dumps(encode_sample(sample)))).weight_version_spans == [[0, 2, "3"]]
