from __future__ import annotations

from argparse import Namespace

import pytest

from miles.ray.placement_group import Bundles, BundleShape, create_placement


def args(trainers: int = 2, engines: int = 3) -> Namespace:
    return Namespace(
        actor_num_nodes=1, actor_num_gpus_per_node=trainers, rollout_num_gpus=engines, rollout_num_gpus_per_engine=1
    )


class FakeGroup:
    def __init__(self, fits: bool) -> None:
        self._fits = fits

    def wait(self, timeout_secs: float) -> bool:
        return self._fits


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The resources of the cluster; a test changes them."""
    resources: dict[str, float] = {"CPU": 8.0}
    monkeypatch.setattr("miles.ray.placement_group.ray.cluster_resources", lambda: resources)
    monkeypatch.setattr(
        "miles.ray.placement_group.ray.nodes", lambda: [{"Alive": True, "Resources": {"GPU": resources.get("GPU", 0)}}]
    )
    monkeypatch.setattr("miles.ray.placement_group.ray.available_resources", lambda: {"CPU": 0.0})
    return resources


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The bundles that were asked for."""
    bundles: list[dict[str, float]] = []

    def placement_group(wanted: list[dict[str, float]], strategy: str) -> FakeGroup:
        bundles.extend(wanted)
        return FakeGroup(fits=True)

    monkeypatch.setattr("miles.ray.placement_group.placement_group", placement_group)
    return bundles


def test_a_cluster_without_gpus_gives_a_cpu_to_each_rank_and_engine_trainers_first(
    cluster: dict[str, float], requested: list[dict[str, float]]
) -> None:
    placement = create_placement(args())
    assert requested == [{"CPU": 1.0}] * 5
    assert (placement.trainers.offset, placement.trainers.count) == (0, 2)
    assert (placement.engines.offset, placement.engines.count) == (2, 3)


def test_engines_that_only_evaluate_come_last_and_have_a_manager(
    cluster: dict[str, float], requested: list[dict[str, float]]
) -> None:
    flags = args()
    flags.eval_num_gpus, flags.eval_num_gpus_per_engine, flags.eval_interval = 2, 1, 10
    with pytest.raises(ValueError, match=r"needs 9 CPUs .2 for training, 3 for rollout, 2 for evaluation, 2 for manag"):
        create_placement(flags)
    cluster["CPU"] = 9
    placement = create_placement(flags)
    assert len(requested) == 7
    assert (placement.eval_engines.offset, placement.eval_engines.count) == (5, 2)


def test_a_cluster_with_gpus_gives_one_to_each(cluster: dict[str, float], requested: list[dict[str, float]]) -> None:
    cluster["GPU"] = 5
    placement = create_placement(args())
    assert requested == [{"CPU": 2.0, "GPU": 2.0}] + [{"CPU": 1.0, "GPU": 1.0}] * 3
    options = placement.trainers.actor_options(1)
    assert (options["num_gpus"], options["num_cpus"]) == (1, 1)
    assert options["scheduling_strategy"].placement_group_bundle_index == 0


def test_the_trainer_ranks_of_a_node_are_one_bundle_so_that_neighbours_are_near(
    cluster: dict[str, float], requested: list[dict[str, float]]
) -> None:
    cluster |= {"GPU": 16, "CPU": 32}
    flags = args(trainers=4)
    flags.actor_num_nodes = 2
    placement = create_placement(flags)
    assert requested[:2] == [{"CPU": 4.0, "GPU": 4.0}] * 2
    strategies = [placement.trainers.actor_options(rank)["scheduling_strategy"] for rank in range(8)]
    assert [strategy.placement_group_bundle_index for strategy in strategies] == [0] * 4 + [1] * 4
    assert placement.engines.offset == 2


def test_more_trainers_on_a_node_than_any_node_has_gpus_is_an_error_at_once(
    cluster: dict[str, float], requested: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster |= {"GPU": 16, "CPU": 32}
    nodes = [{"Alive": True, "Resources": {"GPU": 4.0}}] * 4
    monkeypatch.setattr("miles.ray.placement_group.ray.nodes", lambda: nodes)
    with pytest.raises(ValueError, match="--actor-num-gpus-per-node 8: no node of the Ray cluster has more than 4"):
        create_placement(args(trainers=8))
    assert requested == []


def test_trainer_and_engine_can_share_one_gpu(cluster: dict[str, float], requested: list[dict[str, float]]) -> None:
    cluster["GPU"] = 1
    flags = args(trainers=1, engines=1)
    with pytest.raises(ValueError, match="needs 2 GPUs"):
        create_placement(flags)
    flags.share_one_gpu = True
    placement = create_placement(flags)
    assert requested == [{"CPU": 1.0, "GPU": 0.5}] * 2
    assert [b.actor_options(0)["num_gpus"] for b in (placement.trainers, placement.engines)] == [0.5, 0.5]


def test_without_a_gpu_sharing_one_changes_nothing(
    cluster: dict[str, float], requested: list[dict[str, float]]
) -> None:
    flags = args(trainers=1, engines=1)
    flags.share_one_gpu = True
    create_placement(flags)
    assert requested == [{"CPU": 1.0}] * 2


def test_the_gpus_of_an_engine_on_one_node_are_one_bundle(
    cluster: dict[str, float], requested: list[dict[str, float]]
) -> None:
    cluster |= {"GPU": 10, "CPU": 11}
    flags = args(engines=8)
    flags.rollout_num_gpus_per_engine, flags.num_gpus_per_node = 4, 2
    placement = create_placement(flags)
    assert requested == [{"CPU": 2.0, "GPU": 2.0}] * 5
    assert (placement.engines.offset, placement.engines.count, placement.engines.shape.num_gpus) == (1, 4, 2)
    options = placement.engines.actor_options(3)
    assert (options["num_gpus"], options["num_cpus"]) == (2, 2)
    assert options["scheduling_strategy"].placement_group_bundle_index == 4


def test_an_engine_larger_than_every_node_is_an_error_at_once(
    cluster: dict[str, float], requested: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster |= {"GPU": 16, "CPU": 32}
    nodes = [{"Alive": True, "Resources": {"GPU": 4.0}}] * 4
    monkeypatch.setattr("miles.ray.placement_group.ray.nodes", lambda: nodes)
    flags = args(engines=8)
    flags.rollout_num_gpus_per_engine = 8
    with pytest.raises(ValueError, match=r"needs 8 GPUs of one node, and no node .* has more than 4.*--num-gpus-per"):
        create_placement(flags)
    assert requested == []


def test_external_engines_take_no_place(cluster: dict[str, float], requested: list[dict[str, float]]) -> None:
    flags = args()
    flags.rollout_external = True
    assert create_placement(flags).engines.count == 0
    assert len(requested) == 2


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"CPU": 5}, "the run needs 6 CPUs .* the Ray cluster has 5"),
        ({"CPU": 8, "GPU": 4}, "the run needs 5 GPUs .2 for training, 3 for rollout., the Ray cluster has 4"),
    ],
)
def test_what_can_never_be_placed_is_an_error_at_once(
    cluster: dict[str, float], requested: list[dict[str, float]], resources: dict[str, float], message: str
) -> None:
    cluster.update(resources)
    with pytest.raises(ValueError, match=message):
        create_placement(args())
    assert requested == []


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_one_gpu_for_two_can_be_shared_with_the_embedded_engine(cluster: dict[str, float], engine: str) -> None:
    cluster |= {"GPU": 1}
    flags = args(trainers=1, engines=1)
    flags.rollout_engine = engine
    with pytest.raises(ValueError, match="the run needs 2 GPUs") as error:
        create_placement(flags)
    assert ("--share-one-gpu" in str(error.value)) == (engine == "embedded")


def test_what_others_hold_is_an_error_after_a_while(cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles.ray.placement_group.placement_group", lambda *_, **__: FakeGroup(fits=False))
    with pytest.raises(ValueError, match="no room in the Ray cluster"):
        create_placement(args())


def test_a_bundle_beyond_the_run_is_our_own_mistake() -> None:
    with pytest.raises(IndexError):
        Bundles(FakeGroup(True), 0, BundleShape(1, 0)).actor_options(1)  # type: ignore[arg-type]
