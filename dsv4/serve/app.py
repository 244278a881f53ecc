"""The app: transformers' routes that a client needs, metrics, the cache's page, and the guard.

transformers' app also has routes that load and unload models; they are removed.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from transformers.cli.serving.server import build_server

from dsv4.serve.api_error import ApiError
from dsv4.serve.chat import ChatEndpoint
from dsv4.serve.completions import CompletionEndpoint
from dsv4.serve.endpoint import model_not_found
from dsv4.serve.guard import Guard
from dsv4.serve.metrics import EngineCollector, hits_by_tier, memory_by_component
from dsv4.serve.responses import ResponseEndpoint
from dsv4.serve.served_model import ServedModel

KEPT_ROUTES = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health",
}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


def build_app(served: ServedModel, *, api_key: str | None, max_body: int) -> Guard:
    """Make the ASGI app of a served model; `api_key` guards all but the open paths."""
    reader = ThreadPoolExecutor(1, "dsv4-reader")  # a tokenizer's settings are not for two threads
    build: Any = build_server
    app: FastAPI = build(
        served,
        ChatEndpoint(served, reader),
        completion_handler=CompletionEndpoint(served, reader),
        response_handler=ResponseEndpoint(served, reader),
        transcription_handler=None,
        systemone_handler=None,
        generation_state=served,
    )
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", None) in KEPT_ROUTES
    ]
    _add_errors(app)
    _add_pages(app, served)
    return Guard(app, served, api_key, max_body)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def no_object(request: Request, error: RequestValidationError) -> Response:
        needs = "a JSON object, and the header Content-Type: application/json"
        return ApiError(f"Invalid body: expected {needs}").response()

    @app.exception_handler(HTTPException)
    async def by_status(request: Request, error: HTTPException) -> Response:
        status = 400 if error.status_code == 422 else error.status_code
        message = f"Invalid URL ({request.method} {request.url.path})"
        message = message if status in (404, 405) else str(error.detail)
        return ApiError(message, status=status).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return ApiError("The server failed at this request", status=500).response()


def _add_pages(app: FastAPI, served: ServedModel) -> None:
    served.timings.registry.register(EngineCollector(served.engine))
    page = resources.files("dsv4.serve").joinpath("cache.html").read_text()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != served.name:
            raise model_not_found(name)
        return JSONResponse(served.get_gen_models()[0])

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(served.timings.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/cache")
    async def cache() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    @app.get("/cache/state")
    def state() -> Response:
        return JSONResponse(cache_state(served))


def cache_state(served: ServedModel) -> dict[str, Any]:
    """Return what the page shows: the engine's last snapshot as plain values."""
    now = served.engine.snapshot()
    return {
        "model": served.name,
        "error": served.engine.fatal_error,
        "counts": now.counts,
        "requests": [request._asdict() for request in now.requests],
        "stats": asdict(now.stats),
        "memory": memory_by_component(now),
        "hits": hits_by_tier(now.stats),
    }
