"""Routes that pause, abort and flush, and those that change the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from miles.backends.embedded_engine.errors import ControlError, MalformedBody

if TYPE_CHECKING:
    from miles.backends.embedded_engine.service import EngineService

PAUSE_MODES = ("abort", "retract", "in_place")


class ControlRoutes:
    """Flow control and weights. A refusal is a 400 with `{"success": false, "message": ...}`."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        for path, handler in (
            ("/pause_generation", self.pause_generation),
            ("/continue_generation", self.continue_generation),
            ("/abort_request", self.abort_request),
            ("/flush_cache", self.flush_cache),
            ("/update_weights_from_disk", self.update_weights_from_disk),
            ("/update_weight_version", self.update_weight_version),
            ("/begin_weight_update", self.begin_weight_update),
            ("/end_weight_update", self.end_weight_update),
            ("/init_weights_update_group", self.init_weights_update_group),
            ("/destroy_weights_update_group", self.destroy_weights_update_group),
            ("/update_weights_from_distributed", self.update_weights_from_distributed),
            ("/weights_checker", self.weights_checker),
        ):
            app.router.add_post(path, handler)
        app.router.add_get("/flush_cache", self.flush_cache)

    # Flow control.

    async def pause_generation(self, request: web.Request) -> web.Response:
        from miles.backends.embedded_engine.scheduler import PauseMode

        body = await _body(request)
        mode = body.text("mode", "abort")
        if mode not in PAUSE_MODES:
            raise MalformedBody(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await self._service.on_engine(lambda scheduler: scheduler.pause(PauseMode(mode)))
        self._service.paused = True
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await _body(request)
        await self._service.on_engine(lambda scheduler: scheduler.resume())
        self._service.paused = False
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def abort_request(self, request: web.Request) -> web.Response:
        """Answers at once; the aborted calls answer soon after."""
        body = await _body(request)
        service = self._service
        _ = service.loaded
        if body.flag("abort_all", False):
            service.frontend.abort_all(service.engine)
        else:
            service.frontend.abort(service.engine, body.text("rid", ""))
        return web.Response()

    async def flush_cache(self, _: web.Request) -> web.Response:
        """There is no prefix cache: this frees the KV memory that nobody uses, and refuses where SGLang would."""
        if await self._service.on_engine(lambda scheduler: scheduler.flush_cache()):
            return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    # Weights.

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await _body(request)
        path = body.required_text("model_path")
        flush, version = body.flag("flush_cache", True), body.text_or_none("weight_version")
        service = self._service
        receiver = service.loaded.receiver
        staged = await service.on_weight_thread(lambda: receiver.read_directory(path))
        await self._abort_all_if(body, default=False)
        staged.version = version
        await service.publish(staged)
        service.set_model_path(path)
        if flush and await service.on_engine(lambda s: s.paused is not None and s.num_running > 0):
            raise ControlError(
                "Weights were updated, but the cache was not flushed: requests are paused in_place; "
                "send flush_cache false to keep their cache"
            )
        message = _with_version("Succeeded to update model weights.", version)
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        version = body.required_text("new_version")
        await self._abort_all_if(body, default=True)
        await self._service.on_engine(lambda scheduler: scheduler.publish({}, version))
        return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        body = await _body(request)
        selector = body.text("selector", "all")
        receiver = self._service.loaded.receiver
        await self._service.on_weight_thread(lambda: receiver.begin(selector))
        return _success("Weight update began.")

    async def end_weight_update(self, request: web.Request) -> web.Response:
        """All buckets since begin become the model, together with the version, between two steps."""
        await _body(request)
        staged = await self._service.on_weight_thread(self._service.loaded.receiver.end)
        await self._service.publish(staged)
        return _success("Weight update ended.")

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = await _body(request)
        arguments: dict[str, Any] = {
            "address": body.required_text("master_address"),
            "port": body.required_int("master_port"),
            "rank": body.required_int("rank_offset"),
            "world_size": body.required_int("world_size"),
            "name": body.text("group_name", "weight_update_group"),
            "backend": body.text("backend", "nccl"),
        }
        receiver = self._service.loaded.receiver
        await self._service.on_weight_thread(lambda: receiver.init_group(**arguments))
        return _success("Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        body = await _body(request)
        name = body.text("group_name", "weight_update_group")
        receiver = self._service.loaded.receiver
        await self._service.on_weight_thread(lambda: receiver.destroy_group(name))
        return _success("Succeeded to destroy custom process group.")

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        """Receives one bucket, while generation goes on; it takes effect at end_weight_update."""
        from miles.backends.embedded_engine.weights import parse_specs

        body = await _body(request)
        specs = parse_specs(
            body.list_of("names", str), body.list_of("dtypes", str), [list(s) for s in body.list_of("shapes", list)]
        )
        version = body.text_or_none("weight_version")
        group_name = body.text("group_name", "weight_update_group")
        load_format = body.text_or_none("load_format")
        receiver = self._service.loaded.receiver
        await self._abort_all_if(body, default=False)
        await self._service.on_weight_thread(
            lambda: receiver.receive(specs, group_name=group_name, load_format=load_format, version=version)
        )
        return _success(_with_version("Succeeded to update parameter online.", version))

    async def weights_checker(self, request: web.Request) -> web.Response:
        """Checksums of the published weights, by Hugging Face name; tied weights occur once."""
        from miles.utils.checksum import tensor_checksum

        body = await _body(request)
        if body.required_text("action") != "checksum":
            raise MalformedBody(f"action must be 'checksum', got {body.required_text('action')!r}")
        weights = await self._service.on_engine(lambda scheduler: scheduler.weights())
        checksums = await self._service.on_weight_thread(
            lambda: {name: tensor_checksum(tensor) for name, tensor in weights.items()}
        )
        return _json({"success": True, "message": "Success.", "ranks": [{"checksums": checksums}]})

    async def _abort_all_if(self, body: JsonBody, *, default: bool) -> None:
        if body.flag("abort_all_requests", default):
            await self._service.on_engine(lambda scheduler: scheduler.abort(lambda _: True))


class JsonBody:
    """A JSON object whose fields are checked when they are read. A null field counts as absent."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._typed(name, bool, default))

    def text(self, name: str, default: str) -> str:
        return str(self._typed(name, str, default))

    def text_or_none(self, name: str) -> str | None:
        value = self._fields.get(name)
        return str(value) if isinstance(value, int) else self._typed(name, str, None)

    def required_text(self, name: str) -> str:
        self._require(name)
        return str(self._typed(name, str, ""))

    def required_int(self, name: str) -> int:
        self._require(name)
        return int(self._typed(name, int, 0))

    def list_of(self, name: str, kind: type) -> list[Any]:
        self._require(name)
        values = self._typed(name, list, [])
        if not all(isinstance(value, kind) for value in values):
            raise MalformedBody(f"{name} must be a list of {kind.__name__}")
        return list(values)

    def _require(self, name: str) -> None:
        if self._fields.get(name) is None:
            raise MalformedBody(f"{name}: Field required")

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise MalformedBody(f"{name} must be of type {kind.__name__}, got {value!r}")
        return value


async def _body(request: web.Request) -> JsonBody:
    raw = await request.read()
    if not raw:
        raise MalformedBody("body: Field required")
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedBody("The request body must be a JSON object.")
    return JsonBody(fields)


def _with_version(message: str, version: str | None) -> str:
    return message if version is None else f"{message} Weight version updated to {version}."


def _success(message: str) -> web.Response:
    return _json({"success": True, "message": message})


def _json(content: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(content), headers={"Content-Type": "application/json"})
