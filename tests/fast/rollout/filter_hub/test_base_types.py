import pytest

from miles.rollout.filter_hub.base_types import DynamicFilterOutput, MetricGatherer, call_dynamic_filter


def test_without_a_filter_every_group_is_kept():
    assert call_dynamic_filter(None, object(), []) == DynamicFilterOutput(keep=True, reason=None)


@pytest.mark.parametrize("verdict", [True, False])
def test_a_bare_bool_is_boxed(verdict):
    assert call_dynamic_filter(lambda args, group: verdict, None, []) == DynamicFilterOutput(keep=verdict)


def test_numpy_bool_is_a_bool():
    numpy = pytest.importorskip("numpy")
    assert call_dynamic_filter(lambda: numpy.float64(1) > 2) == DynamicFilterOutput(keep=False)


def test_arguments_and_output_pass_through():
    output = DynamicFilterOutput(keep=False, reason="short")
    seen = []

    def keep_nothing(*args, **kwargs):
        seen.append((args, kwargs))
        return output

    assert call_dynamic_filter(keep_nothing, "args", ["group"], key=1) is output
    assert seen == [(("args", ["group"]), {"key": 1})]


@pytest.mark.parametrize("verdict", [None, "yes", 1])
def test_no_verdict_is_an_error_that_names_the_filter(verdict):
    def forgetful(args, group):
        return verdict

    with pytest.raises(TypeError, match=r"forgetful returned .*DynamicFilterOutput"):
        call_dynamic_filter(forgetful, None, [])


def test_drops_are_counted_by_reason_and_only_with_one():
    gatherer = MetricGatherer()
    assert gatherer.collect() == {}
    for reason in ("zero_std_0.0", "zero_std_1.0", "zero_std_0.0", None, ""):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {
        "rollout/dynamic_filter/drop_zero_std_0.0": 2,
        "rollout/dynamic_filter/drop_zero_std_1.0": 1,
    }
