"""The bracket around a weight update, and what a failure at each point leaves behind. Engines are HTTP fakes here;
test_weight_update_engine.py has the real ones."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.megatron_utils import update_group
from miles.backends.megatron_utils.engine_client import CacheFlushTimeoutError, EngineClient, WeightUpdateError
from miles.backends.megatron_utils.update_group import UpdateGroup
from miles.backends.megatron_utils.weight_update import WeightUpdateConfig, WeightUpdater, compare_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miles.backends.megatron_utils.wire import Piece, WireBucket


def weights() -> Iterator[Piece]:
    yield [("a", torch.ones(3))]
    yield [("b", torch.zeros(2, 2))]


class FakeEngine:
    """Answers every call with 200 but those in `answers`; remembers (path, payload) in `calls`."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, str]]] = {}
        self.calls: list[tuple[str, Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                payload = json.loads(self.rfile.read(length)) if length else None
                if self.path != "/model_info":  # a sign of life
                    engine.calls.append((self.path, payload))
                queue = engine.answers.get(self.path, [])
                status, text = (queue.pop(0) if len(queue) > 1 else queue[0]) if queue else (200, '{"success": true}')
                if not status:
                    return  # the connection closes
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    fakes = [FakeEngine(), FakeEngine()]
    yield fakes
    for fake in fakes:
        fake.close()


def config(**overrides: Any) -> WeightUpdateConfig:
    values: dict[str, Any] = {
        "pause_mode": "retract",
        "buffer_bytes": 1024,
        "flattened": True,
        "ranks_per_engine": 1,
        "backend": "gloo",
        "timeout_secs": 5.0,
        "flush_timeout_secs": 0.2,
    }
    return WeightUpdateConfig(**{**values, **overrides})


@pytest.fixture
def updater_of(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[WeightUpdater, list[list[str]]]]:
    """An updater in whose group the broadcast is only noted down: (updater, names per bucket)."""

    def build(**overrides: Any) -> tuple[WeightUpdater, list[list[str]]]:
        updater = WeightUpdater(config(**overrides))
        sent: list[list[str]] = []
        updater._engines = [EngineClient(fake.url, 5.0) for fake in engines]
        updater._groups = [UpdateGroup("g", updater._engines, object(), object())]  # type: ignore[arg-type]

        def send(bucket: WireBucket, version: int) -> None:
            sent.append(bucket.names)
            for fake in engines:
                fake.calls.append(("/bucket", version))

        monkeypatch.setattr(updater, "_send", send)
        monkeypatch.setattr(update_group, "_abort_and_destroy", lambda group: None)
        return updater, sent

    return build


def test_a_refusal_is_heard_while_nccl_still_waits_for_the_engine_that_refused(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first broadcast makes the communicator, and returns only once every member takes part."""
    updater, let_go = WeightUpdater(config(backend="nccl")), threading.Event()
    updater._engines = [EngineClient(fake.url, 5.0) for fake in engines]
    group = UpdateGroup("g", updater._engines, object(), object())  # type: ignore[arg-type]

    def broadcast(tensors: list[torch.Tensor]) -> None:
        assert let_go.wait(5), "the refusal was not heard"

    monkeypatch.setattr(group, "broadcast", broadcast)
    updater._groups = [group]
    engines[1].answers["/update_weights_from_distributed"] = [(400, '{"success": false, "message": "no"}')]
    (bucket,) = updater._config.packer().buckets([[("a", torch.ones(3))]])
    try:
        with pytest.raises(WeightUpdateError, match="answered 400"):
            updater._send(bucket, 1)
    finally:
        let_go.set()


def test_an_engine_that_answers_and_does_not_leave_is_blamed_rather_than_one_that_waited_behind_it(
    engines: list[FakeEngine], updater_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an SGLang whose scheduler hangs, in a group of all engines."""
    updater, _ = updater_of()
    first, second = updater.engines

    def send(bucket: WireBucket, version: int) -> None:
        raise WeightUpdateError(first.url, "/update_weights_from_distributed", None, "timed out")

    monkeypatch.setattr(updater, "_send", send)
    monkeypatch.setattr(updater._groups[0], "leave", lambda answering: [second])
    with pytest.raises(WeightUpdateError, match=r"does not leave the group; seen as: .*timed out") as error:
        updater.update(weights(), 3)
    assert error.value.engine_urls == (second.url,)


def test_an_update_that_breaks_off_is_given_up_though_the_trainer_waits_for_its_gpu(
    engines: list[FakeEngine], updater_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing GPU memory waits for every kernel, that of a broadcast to a dead engine too: only another thread can
    abort it."""
    updater, _ = updater_of(buffer_bytes=12)
    aborted = threading.Event()

    def send(bucket: WireBucket, version: int) -> None:
        raise WeightUpdateError(engines[1].url, "/update_weights_from_distributed", None, "reset")

    def gathering() -> Iterator[Piece]:
        first, second = weights()
        yield first
        assert aborted.wait(20), "rank 0 stands still"
        yield second

    monkeypatch.setattr(updater, "_send", send)
    monkeypatch.setattr(update_group, "_abort_and_destroy", lambda group: aborted.set())
    with pytest.raises(WeightUpdateError, match="reset"):
        updater.update(gathering(), 1)
    for fake in engines:
        assert fake.paths.count("/destroy_weights_update_group") == 1


class NcclWork:
    """A broadcast over NCCL: `wait` returns at once, whatever the GPU does."""

    def __init__(self) -> None:
        self.complete = threading.Event()
        self.asked = threading.Event()

    def is_completed(self) -> bool:
        self.asked.set()
        return self.complete.is_set()

    def wait(self) -> None:
        assert self.complete.is_set(), "from here on the GPU's stream would wait"


def nccl_group(engines: list[FakeEngine], works: list[NcclWork], timeout_secs: float = 20.0) -> UpdateGroup:
    clients = [EngineClient(fake.url, 5.0) for fake in engines]
    group = UpdateGroup("g", clients, object(), object(), backend="nccl", timeout_secs=timeout_secs)  # type: ignore[arg-type]
    group._broadcasts = list(works)
    return group


def test_no_stream_of_the_gpu_waits_for_a_broadcast_that_may_never_end() -> None:
    work = NcclWork()
    with pytest.raises(RuntimeError, match=r"has not ended after 0\.05 s"):
        nccl_group([], [work], timeout_secs=0.05).wait_until_sent()
    sender = threading.Thread(target=nccl_group([], [work]).wait_until_sent)
    work.asked.clear()
    sender.start()
    assert work.asked.wait(20)
    work.complete.set()
    sender.join(20)
    assert not sender.is_alive()


def test_what_is_on_its_way_to_a_healthy_engine_arrives_before_the_group_is_aborted(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait on its GPU for the rest, for ever."""
    work, aborted = NcclWork(), threading.Event()
    monkeypatch.setattr(update_group, "_abort_and_destroy", lambda group: aborted.set())
    leaving = threading.Thread(target=nccl_group(engines, [work]).leave)
    leaving.start()
    assert work.asked.wait(20)
    assert not aborted.is_set()
    work.complete.set()
    leaving.join(20)
    assert aborted.is_set()


def test_engines_that_wait_on_their_gpus_behind_another_one_are_lost_with_it_and_named(
    engines: list[FakeEngine], updater_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared group over NCCL: aborting rank 0's side ends its own broadcast and not theirs."""
    updater, _ = updater_of(shares_group=True, backend="nccl")
    work = NcclWork()
    updater._groups = [nccl_group(engines, [work])]
    monkeypatch.setattr(update_group, "_END_SECS", 0.05)
    monkeypatch.setattr(update_group, "_abort_and_destroy", lambda group: work.complete.set())
    for fake in engines:
        fake.answers["/destroy_weights_update_group"] = [(0, "")]  # no answer

    def send(bucket: WireBucket, version: int) -> None:
        raise RuntimeError("a broadcast of weights has not ended")

    monkeypatch.setattr(updater, "_send", send)
    with pytest.raises(WeightUpdateError, match=r"--update-weight-group own.*has not ended") as error:
        updater.update(weights(), 3)
    assert error.value.engine_urls == tuple(fake.url for fake in engines) and error.value.status is None


@pytest.mark.parametrize(
    ("on_gpu", "asked", "shares"),
    [(True, None, True), (True, "own", False), (False, None, False), (False, "shared", True)],
)
def test_engines_share_a_group_where_nothing_is_lost_by_it(
    on_gpu: bool, asked: str | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on without an engine asks for "own" ones: see the flag's default in test_arguments_rules.py."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    updater = WeightUpdater(WeightUpdateConfig.from_args(Namespace(update_weight_group=asked)))
    updater._engines = [EngineClient(f"http://e{index}", 5.0) for index in range(3)]
    assert len(updater._parts()) == (1 if shares else 3)


def test_the_bracket_is_opened_and_closed_in_order_on_every_engine(
    engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    updater, sent = updater_of(buffer_bytes=12)
    times = updater.update(weights(), 3)
    for fake in engines:
        assert fake.calls == [
            ("/pause_generation", {"mode": "retract"}),
            ("/flush_cache", None),
            ("/begin_weight_update", {"selector": "all"}),
            ("/bucket", 3),
            ("/bucket", 3),
            ("/end_weight_update", {}),
            ("/continue_generation", {}),
        ]
    assert sent == [["a"], ["b"]]
    assert times["perf/update_weights_bytes"] == 12 + 16
    assert 0 < times["perf/weight_update_pause_seconds"] <= times["perf/update_weights_time"]


def test_in_place_keeps_the_caches(engines: list[FakeEngine], updater_of: Callable[..., Any]) -> None:
    updater_of(pause_mode="in_place")[0].update(weights(), 1)
    assert "/flush_cache" not in engines[0].paths
    assert engines[0].calls[0] == ("/pause_generation", {"mode": "in_place"})


def test_an_engine_without_the_bracket_is_updated_without_it(
    engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    for fake in engines:
        fake.answers = {
            path: [(404, '{"detail": "Not Found"}')] for path in ("/begin_weight_update", "/end_weight_update")
        }
    updater, sent = updater_of()
    updater.update(weights(), 1)
    assert sent == [["a", "b"]] and engines[1].paths[-1] == "/continue_generation"


def test_a_flush_is_tried_again_while_requests_wind_down(
    engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    engines[1].answers["/flush_cache"] = [(400, "Flush cache failed.\n"), (400, "Flush cache failed.\n"), (200, "ok")]
    updater_of(flush_timeout_secs=5.0)[0].update(weights(), 1)
    assert engines[1].paths.count("/flush_cache") == 3 and engines[0].paths.count("/flush_cache") == 1


def test_a_flush_that_never_succeeds_ends_in_a_timeout_that_names_the_engine(
    engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    engines[1].answers["/flush_cache"] = [(400, "Flush cache failed.\n")]
    with pytest.raises(CacheFlushTimeoutError, match=r"no flush within 0\.2 s") as error:
        updater_of()[0].update(weights(), 1)
    assert error.value.engine_url == engines[1].url and isinstance(error.value, TimeoutError)
    assert [fake.paths[-1] for fake in engines] == ["/continue_generation"] * 2, "nothing stays paused"


@pytest.mark.parametrize("endpoint", ["/pause_generation", "/begin_weight_update"])
def test_a_refusal_before_the_first_bucket_leaves_the_engines_running(
    endpoint: str, engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    engines[0].answers[endpoint] = [(400, '{"success": false, "message": "busy"}')]
    updater, sent = updater_of()
    with pytest.raises(WeightUpdateError, match="busy") as error:
        updater.update(weights(), 1)
    assert (error.value.endpoint, error.value.status, error.value.engine_url) == (endpoint, 400, engines[0].url)
    assert sent == []
    for fake in engines:
        assert fake.paths[-1] == "/continue_generation"
        assert ("/end_weight_update" in fake.paths) == (endpoint == "/begin_weight_update")
        assert fake.paths.count("/pause_generation") == 1, "never retried"


def test_a_failure_after_the_first_bucket_keeps_the_engines_paused_and_dismisses_them(
    engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    engines[1].answers["/end_weight_update"] = [(400, '{"success": false, "message": "no"}')]
    with pytest.raises(WeightUpdateError, match="/end_weight_update"):
        updater_of()[0].update(weights(), 1)
    for fake in engines:
        assert "/continue_generation" not in fake.paths
        assert fake.paths[-1] == "/destroy_weights_update_group"


def test_success_false_with_status_200_is_a_refusal(engines: list[FakeEngine], updater_of: Callable[..., Any]) -> None:
    engines[0].answers["/begin_weight_update"] = [(200, '{"success": false, "message": "half"}')]
    with pytest.raises(WeightUpdateError, match="half"):
        updater_of()[0].update(weights(), 1)


def test_a_dead_engine_is_named_at_once(engines: list[FakeEngine], updater_of: Callable[..., Any]) -> None:
    updater, _ = updater_of()
    updater._engines[1] = EngineClient("http://127.0.0.1:9", 300.0)  # longer than the test may take
    with pytest.raises(WeightUpdateError, match=r"127\.0\.0\.1:9 gave no answer to /pause_generation") as error:
        updater.update(weights(), 1)
    assert error.value.status is None


def test_update_before_connect_is_an_error_of_the_caller() -> None:
    with pytest.raises(RuntimeError, match="connect"):
        WeightUpdater(config()).update(weights(), 1)
    with pytest.raises(ValueError, match="no engines"):
        WeightUpdater(config()).connect([])


def test_the_pause_begins_when_the_first_bucket_is_ready(
    engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    seen: list[list[str]] = []

    def gathering() -> Iterator[Piece]:
        for piece in weights():
            seen.append(engines[0].paths)
            yield piece

    updater_of(buffer_bytes=12)[0].update(gathering(), 1)
    assert seen[0] == []


def test_the_next_bucket_is_prepared_while_the_last_one_is_sent(
    updater_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered_next = threading.Event()

    def gathering() -> Iterator[Piece]:
        first, second = weights()
        yield first
        gathered_next.set()
        yield second

    updater, _ = updater_of(buffer_bytes=12)
    overlapped: list[bool] = []
    monkeypatch.setattr(updater, "_send", lambda bucket, version: overlapped.append(gathered_next.wait(10)))
    updater.update(gathering(), 1)
    assert overlapped == [True, True]


def test_an_update_that_was_never_ended_is_ended_before_the_next_one_begins(
    engines: list[FakeEngine], updater_of: Callable[..., Any]
) -> None:
    twice = (400, '{"success": false, "message": "begin_weight_update() was called twice"}')
    engines[0].answers["/begin_weight_update"] = [twice, (200, '{"success": true}')]
    updater_of()[0].update(weights(), 1)
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert [path for path in engines[0].paths if path in (begin, end)] == [begin, end, begin, end]
    assert engines[0].paths[-1] == "/continue_generation"


def test_a_failure_of_the_gather_keeps_its_type(updater_of: Callable[..., Any]) -> None:
    def gathering() -> Iterator[Piece]:
        yield [("a", torch.ones(3))]
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        updater_of(buffer_bytes=12)[0].update(gathering(), 1)


def test_the_error_survives_a_process_boundary() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(WeightUpdateError("http://e", "/x", 400, "why").naming(("http://e", "http://f"))))
    assert (error.engine_url, error.endpoint, error.status, error.body) == ("http://e", "/x", 400, "why")
    assert error.engine_urls == ("http://e", "http://f")


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"a": "1", "b": "3"}, "'b' differs"),
        ({"a": "1"}, "no parameter 'b'"),
        ({"a": "1", "b": "2", "c": "3"}, "has 'c'"),
    ],
)
def test_the_first_difference_is_named(engine: dict[str, str], words: str) -> None:
    trainer = {"a": "1", "b": "2"}
    compare_checksums(trainer, dict(trainer), "http://e")
    with pytest.raises(ValueError, match=words):
        compare_checksums(trainer, engine, "http://e")


@pytest.mark.parametrize("flags", [{"pause_generation_mode": "later"}, {"update_weight_buffer_size": 0}])
def test_wrong_flags_are_named(flags: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--" + next(iter(flags)).replace("_", "-")):
        WeightUpdateConfig.from_args(Namespace(**flags))


@pytest.mark.parametrize(
    ("on_gpu", "shares", "backend"),
    [(True, False, "nccl"), (True, True, "gloo"), (False, False, "gloo"), (False, True, "gloo")],
)
def test_trainer_and_engine_on_one_gpu_meet_in_host_memory(
    on_gpu: bool, shares: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    assert WeightUpdateConfig.from_args(Namespace(share_one_gpu=shares)).backend == backend
    on_the_cpu = Namespace(share_one_gpu=shares, rollout_engine="embedded", embedded_device="cpu")
    assert WeightUpdateConfig.from_args(on_the_cpu).backend == "gloo"
