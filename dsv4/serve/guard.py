"""`Guard`: what every request passes before the app, and its end when the client has gone."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from transformers.cli.serving.utils import X_REQUEST_ID

from dsv4.serve.api_error import ApiError
from dsv4.serve.served_model import ServedModel

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/cache")  # they need no key: neither has a word about requests
BODY_SECONDS = 60.0
DRAINED = 8  # times the largest body: a client that is still sending would not read a refusal


@dataclass(frozen=True)
class Guard:
    """Checks key and size of a request, numbers it, and cancels it when its client has gone.

    Clients must send the `api_key`, unless it is None. A body has at most `max_body` bytes.
    """

    app: App
    served: ServedModel
    api_key: str | None = field(repr=False)
    max_body: int

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive, self._refusal(scope["path"], headers))
        except TimeoutError:
            await ApiError("The body did not come", status=408).response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            if body is not None:
                await self._run(scope, headers, body, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self.api_key is None or path in OPEN_PATHS:
            return None
        expected = f"Bearer {self.api_key}".encode()
        if hmac.compare_digest(headers.get(b"authorization", b""), expected):
            return None
        return ApiError("Incorrect API key provided", status=401, code="invalid_api_key")

    async def _read(self, receive: Receive, refusal: ApiError | None) -> bytes | None:
        """Return the body, or None if the client has gone."""
        parts: list[bytes] = []
        size, is_more = 0, True
        while is_more and size <= DRAINED * self.max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            is_more, size = message.get("more_body", False), size + len(part)
            if refusal is None and size > self.max_body:
                parts.clear()
                text = f"Invalid body: expected at most {self.max_body} bytes"
                refusal = ApiError(text, status=413, code="request_too_large")
            if refusal is None:
                parts.append(part)
        if refusal is not None:
            raise refusal
        return b"".join(parts)

    async def _run(
        self, scope: Message, headers: dict[bytes, bytes], body: bytes, receive: Receive, send: Send
    ) -> None:
        # The engine needs ids that no client chooses.
        request_id = uuid4().hex
        headers[X_REQUEST_ID.encode()] = request_id.encode()
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await asyncio.Future()

        scope = {**scope, "headers": list(headers.items())}
        app = asyncio.ensure_future(self.app(scope, replay, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((app, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            app.cancel()
            self.served.close(request_id)
        with suppress(asyncio.CancelledError):
            await app


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
