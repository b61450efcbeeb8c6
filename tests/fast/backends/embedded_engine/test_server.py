"""The HTTP routes over a real engine thread, in this process."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from miles.backends.embedded_engine.config import EngineConfig
from miles.backends.embedded_engine.server import make_app
from miles.backends.embedded_engine.service import EngineService
from tests.fast.backends.embedded_engine.tiny import char_ids, char_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

PROMPT = char_ids("52914>")


@dataclass
class Client:
    """One server and one client session."""

    url: str
    session: aiohttp.ClientSession
    service: EngineService

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, **({"json": body} | kwargs)) as response:
            return response.status, _content(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, _content(await response.read())

    async def generate(self, **body: Any) -> Any:
        status, content = await self.post("/generate", {"input_ids": PROMPT, **body})
        assert status == 200, content
        return content

    async def state(self) -> dict[str, Any]:
        _, info = await self.get("/server_info")
        return dict(info["internal_states"][0])

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a state of the scheduler; the test's timeout bounds it."""
        while not condition(await self.state()):  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.001)

    async def start(self, count: int = 1, **body: Any) -> list[asyncio.Task[tuple[int, Any]]]:
        """Long requests that are running and stay so until told otherwise."""
        params = {"max_new_tokens": 480, "ignore_eos": True}
        tasks = [
            asyncio.create_task(
                self.post("/generate", {"input_ids": PROMPT, "sampling_params": params, "rid": f"long-{i}"} | body)
            )
            for i in range(count)
        ]
        await self.until(lambda state: state["num_running_reqs"] >= count and state["tokens_generated"] >= 3 * count)
        return tasks


def _content(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


async def loaded(service: EngineService) -> None:
    """Wait until the model is loaded; fail where it cannot be."""
    waits = [asyncio.create_task(service.ready.wait()), asyncio.create_task(service.ended.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    assert service.ready.is_set(), service.engine.failure


@asynccontextmanager
async def serving(config: EngineConfig, *, wait: bool = True) -> AsyncIterator[Client]:
    service = EngineService(config)
    runner = web.AppRunner(make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    if wait:
        service.start()
        await loaded(service)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        try:
            yield Client(f"http://127.0.0.1:{port}", session, service)
        finally:
            await service.close()
            await runner.cleanup()


@pytest.fixture
async def client(model_dir: Path) -> AsyncIterator[Client]:
    async with serving(EngineConfig(str(model_dir), health_timeout=0.2)) as client:
        yield client


async def test_health_is_503_until_the_model_is_loaded(model_dir: Path) -> None:
    async with serving(EngineConfig(str(model_dir)), wait=False) as client:
        for path in ("/health", "/ready", "/health_generate"):
            assert await client.get(path) == (503, "")
        assert (await client.post("/generate", {"input_ids": PROMPT}))[0] == 503
        client.service.start()
        await loaded(client.service)
        for path in ("/health", "/ready", "/health_generate", "/ping"):
            assert await client.get(path) == (200, "")


async def test_generate_answers_ids_text_and_logprobs(client: Client) -> None:
    params = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0.7}
    answer = await client.generate(sampling_params=params, return_logprob=True, logprob_start_len=0, rid="mine")
    meta = answer["meta_info"]
    assert answer["text"] == char_text(answer["output_ids"])
    assert meta["id"] == "mine"
    assert meta["engine_url"].startswith("http://")
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["output_token_logprobs_length"]) == (6, 5, 5)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0] == [None, PROMPT[0], None]
    without = await client.generate(sampling_params=params)
    assert "output_token_logprobs" not in without["meta_info"]


async def test_text_batches_and_copies(client: Client) -> None:
    params = {"max_new_tokens": 2, "n": 2, "ignore_eos": True}
    status, answers = await client.post("/generate", {"text": ["abc", "x"], "sampling_params": params})
    assert status == 200
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 3, 1, 1]
    assert isinstance(await client.generate(input_ids=[PROMPT]), list)
    async with client.session.put(client.url + "/generate", json={"text": "abc"}) as response:
        assert response.status == 200


async def test_a_stop_token_is_in_the_ids_but_not_in_the_text(client: Client) -> None:
    free = await client.generate(sampling_params={"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 1})
    third = free["output_ids"][2]
    first = free["output_ids"].index(third)
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 1, "stop_token_ids": [third]}
    stopped = await client.generate(sampling_params=params)
    assert stopped["output_ids"] == free["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
    assert stopped["text"] == char_text(stopped["output_ids"][:-1])
    untrimmed = await client.generate(sampling_params=params | {"no_stop_trim": True})
    assert untrimmed["text"] == char_text(untrimmed["output_ids"])


async def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    free = await client.generate(sampling_params=params)
    stop = free["text"][3:5]
    stopped = await client.generate(sampling_params=params | {"stop": ["never-there", stop]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free["text"][: free["text"].index(stop)]
    assert free["output_ids"][: len(stopped["output_ids"])] == stopped["output_ids"]
    untrimmed = await client.generate(sampling_params=params | {"stop": stop, "no_stop_trim": True})
    assert untrimmed["text"].endswith(stop)


async def test_a_stream_is_cumulative_and_ends_with_done(client: Client) -> None:
    params = {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 3}
    whole = await client.generate(sampling_params=params, return_logprob=True)
    body = {"input_ids": PROMPT, "sampling_params": params, "stream": True, "return_logprob": True}
    async with client.session.post(client.url + "/generate", json=body) as response:
        assert response.content_type == "text/event-stream"
        lines = [line.decode().strip() async for line in response.content if line.strip()]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for chunk in chunks[:-1]:
        size = len(chunk["output_ids"])
        assert chunk["meta_info"]["finish_reason"] is None
        assert chunk["output_ids"] == whole["output_ids"][:size]
        assert whole["text"].startswith(chunk["text"])
        assert len(chunk["meta_info"]["output_token_logprobs"]) == size
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


async def test_a_streamed_list_has_an_index_in_each_chunk(client: Client) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "n": 2}, "stream": True}
    async with client.session.post(client.url + "/generate", json=body) as response:
        text = (await response.read()).decode()
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    finished = [chunk["index"] for chunk in chunks if chunk["meta_info"]["finish_reason"]]
    assert sorted(finished) == [0, 1]


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (
            {"input_ids": [3] * 3000},
            {"error": {"message": "The input (3000 tokens) is longer than the model's context length (512 tokens)."}},
        ),
        ({"input_ids": [97]}, {"error": {"message": "Token id 97 is not in the vocabulary (0 to 96)."}}),
        (
            {"input_ids": [3], "sampling_params": {"temperature": -1}},
            {"error": {"message": "temperature must be a non-negative finite number, got -1.0."}},
        ),
        ({}, {"error": {"message": "Either text, input_ids or input_embeds should be provided."}}),
    ],
)
async def test_bad_requests_are_400_and_the_server_lives_on(client: Client, body: Any, content: Any) -> None:
    assert await client.post("/generate", body) == (400, content)
    assert (await client.generate(sampling_params={"max_new_tokens": 1}))["output_ids"]


async def test_error_bodies_of_broken_requests(client: Client) -> None:
    status, content = await client.post("/generate", {"input_ids": [3], "sampling_params": {"bar": 1}})
    assert status == 400
    assert "bar" in content["error"]
    status, content = await client.post("/generate", json=None, data=b"{nonsense")
    assert (status, content["object"], content["code"]) == (400, "error", 400)
    assert await client.get("/nowhere") == (404, {"detail": "Not Found"})
    assert await client.get("/generate") == (405, {"detail": "Method Not Allowed"})
    assert await client.get("/get_weight_version") == (404, {"detail": "Not Found"})


async def test_a_duplicate_id_is_refused_while_the_first_is_in_flight(client: Client) -> None:
    (first,) = await client.start()
    status, content = await client.post("/generate", {"input_ids": PROMPT, "rid": "long-0"})
    assert (status, content) == (400, {"error": {"message": "Duplicate request ID detected: long-0"}})
    await client.post("/abort_request", {"rid": "long-0"})
    await first
    assert (await client.generate(rid="long-0"))["meta_info"]["id"] == "long-0"


async def test_an_aborted_request_is_200_with_its_partial_tokens(client: Client) -> None:
    tasks = await client.start(2, return_logprob=True)
    assert await client.post("/abort_request", {"rid": "long-0"}) == (200, "")
    status, answer = await tasks[0]
    assert status == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 480
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    assert not tasks[1].done()
    assert await client.post("/abort_request", {"rid": "nobody"}) == (200, "")
    assert await client.post("/abort_request", {"rid": ""}) == (200, "")
    assert not tasks[1].done()
    assert await client.post("/abort_request", {"abort_all": True}) == (200, "")
    assert (await tasks[1])[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_aborting_the_id_of_a_batch_aborts_all_of_it(client: Client) -> None:
    (task,) = await client.start(input_ids=[PROMPT, PROMPT, PROMPT], rid="batch")
    await client.post("/abort_request", {"rid": "batch"})
    _, answers = await task
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 3


async def test_a_client_that_hangs_up_frees_its_place(client: Client) -> None:
    tasks = await client.start(3)
    tasks[1].cancel()
    await client.until(lambda state: state["num_running_reqs"] == 2)
    await client.post("/abort_request", {"abort_all": True})
    assert [status for status, _ in await asyncio.gather(tasks[0], tasks[2])] == [200, 200]
    await client.until(lambda state: state["num_running_reqs"] == client.service.frontend.num_active == 0)


async def test_a_client_that_hangs_up_a_stream_frees_its_place(client: Client) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}, "stream": True}
    response = await client.session.post(client.url + "/generate", json=body)
    await response.content.readline()
    response.close()
    await client.until(lambda state: state["num_running_reqs"] == client.service.frontend.num_active == 0)


async def test_a_client_that_hangs_up_while_a_chunk_is_written_leaves_no_traceback(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = web.StreamResponse.write

    async def hang_up_and_write(response: web.StreamResponse, data: Any) -> None:
        assert response._req is not None and response._req.transport is not None
        response._req.transport.abort()  # this write notices it, before the handler is cancelled
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", hang_up_and_write)
    with pytest.raises(aiohttp.ClientError):
        await client.generate(stream=True)
    monkeypatch.undo()
    await client.until(lambda state: state["num_running_reqs"] == client.service.frontend.num_active == 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_reset_connection_that_is_not_the_clients_is_500_and_logged(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise ConnectionResetError("somebody else's")

    monkeypatch.setattr(client.service.frontend, "submit", fail)
    assert (await client.post("/generate", {"input_ids": PROMPT}))[0] == 500
    assert "POST /generate failed" in caplog.text


async def test_health_answers_at_once_while_paused_and_health_generate_times_out(client: Client) -> None:
    for mode in ("abort", "retract", "in_place"):
        assert (await client.post("/pause_generation", {"mode": mode}))[0] == 200
        assert await client.get("/health") == (200, "")
        assert await client.get("/ready") == (503, "")
        assert await client.get("/health_generate") == (503, "")
        assert await client.post("/continue_generation", {}) == (
            200,
            {"message": "Generation continued successfully.", "status": "ok"},
        )
        assert await client.get("/health_generate") == (200, "")


async def test_a_full_engine_that_goes_on_generating_is_healthy(model_dir: Path) -> None:
    """The token that /health_generate asks for waits behind what runs, for longer than the health timeout."""
    async with serving(EngineConfig(str(model_dir), max_running_requests=1, health_timeout=0.2)) as client:
        tasks = await client.start()
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}}
        tasks += [asyncio.create_task(client.post("/generate", body)) for _ in range(3)]
        await client.until(lambda state: state["num_waiting_reqs"] == 3)
        assert await client.get("/health_generate") == (200, "")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_pause_abort_ends_what_runs_and_holds_what_comes(client: Client) -> None:
    tasks = await client.start(2)
    assert await client.post("/pause_generation", {}) == (
        200,
        {"message": "Generation paused successfully.", "status": "ok"},
    )
    answers = [answer for _, answer in await asyncio.gather(*tasks)]
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]
    held = asyncio.create_task(client.generate(sampling_params={"max_new_tokens": 1}))
    await client.until(lambda state: state["num_waiting_reqs"] == 1)
    assert not held.done()
    await client.post("/pause_generation", {})
    answer = await held
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert (answer["output_ids"], answer["meta_info"]["weight_versions"], answer["text"]) == ([], [], "")
    held = asyncio.create_task(client.generate(sampling_params={"max_new_tokens": 1}))
    await client.until(lambda state: state["num_waiting_reqs"] == 1)
    await client.post("/continue_generation", {})
    assert len((await held)["output_ids"]) == 1


@pytest.mark.parametrize(("mode", "retractions", "flush"), [("retract", 1, 200), ("in_place", 0, 400)])
async def test_paused_requests_go_on_with_a_new_version(
    client: Client, mode: str, retractions: int, flush: int
) -> None:
    (task,) = await client.start()
    await client.post("/pause_generation", {"mode": mode})
    assert (await client.post("/flush_cache"))[0] == flush
    status, content = await client.post("/update_weight_version", {"new_version": "8", "abort_all_requests": False})
    assert (status, content) == (200, {"success": True, "message": "Weight version updated to 8", "new_version": "8"})
    await client.post("/continue_generation", {})
    _, answer = await task
    meta = answer["meta_info"]
    assert meta["weight_version"] == "8"
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "8"]
    assert meta["weight_versions"][-1]["end"] == 480
    assert meta["num_retractions"] == retractions


async def test_weights_from_disk_while_requests_are_paused_in_place(client: Client, model_dir: Path) -> None:
    (task,) = await client.start()
    await client.post("/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(model_dir), "weight_version": "1"}
    status, content = await client.post("/update_weights_from_disk", body)
    assert (status, content["success"]) == (400, False)
    assert content["message"].startswith("Weights were updated, but the cache was not flushed")
    body |= {"weight_version": "2", "flush_cache": False}
    assert (await client.post("/update_weights_from_disk", body))[0] == 200
    await client.post("/continue_generation", {})
    spans = (await task)[1]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "2"]


async def test_update_weight_version_aborts_by_default(client: Client) -> None:
    (task,) = await client.start()
    await client.post("/update_weight_version", {"new_version": "8"})
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_flush_cache_says_what_sglang_says(client: Client) -> None:
    status, text = await client.get("/flush_cache")
    assert status == 200
    assert text.startswith("Cache flushed.\n")
    (task,) = await client.start()
    assert await client.post("/flush_cache") == (400, "Flush cache failed.\n")
    await client.post("/abort_request", {"abort_all": True})
    await task


async def test_control_bodies_are_checked(client: Client) -> None:
    for path in ("/pause_generation", "/continue_generation", "/abort_request", "/begin_weight_update"):
        status, content = await client.post(path, json=None)
        assert (status, content["message"]) == (400, "body: Field required")
    assert (await client.post("/pause_generation", {"mode": "later"}))[0] == 400
    assert (await client.post("/abort_request", {"abort_all": "yes"}))[0] == 400
    assert (await client.post("/update_weight_version", {}))[0] == 400
    assert (await client.post("/weights_checker", {"action": "dance"}))[0] == 400
    assert (await client.post("/pause_generation", [1]))[0] == 400


async def test_more_requests_than_the_queue_holds_are_503(model_dir: Path) -> None:
    async with serving(EngineConfig(str(model_dir), max_queued_requests=2)) as client:
        tasks = await client.start(2)
        status, content = await client.post("/generate", {"input_ids": PROMPT})
        assert status == 503
        assert content["error"]["message"] == "The request queue is full (2 requests)."
        await client.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*tasks)
        await client.generate(sampling_params={"max_new_tokens": 1})


async def test_a_step_that_fails_ends_the_engine_and_tells_everybody(client: Client) -> None:
    tasks = await client.start(2)

    def break_it(scheduler: Any) -> None:
        def fail() -> None:
            raise RuntimeError("out of memory")

        scheduler.step = fail

    client.service.engine.post(break_it)
    assert [status for status, _ in await asyncio.gather(*tasks)] == [503, 503]
    await client.service.ended.wait()
    assert isinstance(client.service.engine.failure, RuntimeError)
    assert await client.get("/health") == (503, "")
    assert (await client.post("/generate", {"input_ids": PROMPT}))[0] == 503
    assert (await client.post("/pause_generation", {}))[0] == 503


async def test_closing_answers_those_who_wait(model_dir: Path) -> None:
    async with serving(EngineConfig(str(model_dir))) as client:
        tasks = await client.start(2)
        await client.service.close()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [503, 503]
        await client.service.close()


async def test_information(client: Client, model_dir: Path) -> None:
    status, info = await client.get("/model_info")
    assert status == 200
    assert info["model_path"] == info["served_model_name"] == str(model_dir)
    assert (info["weight_version"], info["model_type"]) == ("default", "qwen3")
    assert await client.get("/get_model_info") == (200, info)
    _, server = await client.get("/server_info")
    assert (server["context_length"], server["dtype"], server["tp_size"]) == (512, "float32", 1)
    _, models = await client.get("/v1/models")
    assert models["data"][0]["id"] == str(model_dir)
