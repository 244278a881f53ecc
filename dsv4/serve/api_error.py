"""`ApiError`: a refusal as OpenAI's API words it, and its response."""

import json
from typing import Any

from fastapi.responses import JSONResponse

TYPES = {429: "rate_limit_error"}


class ApiError(Exception):
    """A request that gets no answer.

    Attributes:
        status: The HTTP status.
        param, code: The field at fault and a word for the fault, where there are any.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(_encodable(message))
        self.status, self.param, self.code = status, param and _encodable(param), code

    def body(self) -> dict[str, Any]:
        """Return the JSON object that tells a client of it."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, other)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def event(self) -> str:
        """Return it as an event of a stream that has begun."""
        return f"data: {json.dumps(self.body())}\n\n"

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 429 else None
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def _encodable(text: str) -> str:
    """Replace halves of surrogate pairs, for which UTF-8 has no bytes: a client may send them."""
    return text.encode("utf-8", "replace").decode()
