"""SageMaker's headers of `/invocations` as vLLM 0.32 and its model-hosting-container-standards read them."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any, Final

from kvroute.clock import Clock
from kvroute.sim.http import ApiError, Call

_ADAPTER: Final = b"x-amzn-sagemaker-adapter-identifier"
_SESSION: Final = b"x-amzn-sagemaker-session-id"
_NEW: Final = b"x-amzn-sagemaker-new-session-id"
_CLOSED: Final = b"x-amzn-sagemaker-closed-session-id"
_LASTS_S: Final = 1200.0


class Sessions:
    """The stateful sessions of a worker. Mutable: `open`, `close`, and those that end by themselves."""

    def __init__(self, clock: Clock, *, enabled: bool) -> None:
        self._clock = clock
        self.enabled = enabled
        self._ends: dict[str, float] = {}

    def open(self) -> tuple[str, datetime]:
        """A new session and when it ends."""
        session, ends = str(uuid.uuid4()), self._clock.wall() + _LASTS_S
        self._ends[session] = ends
        return session, datetime.fromtimestamp(ends, UTC)

    def check(self, session: str) -> None:
        """Raises `ApiError` if there is no such session."""
        if not self.enabled:
            raise ApiError.invalid("Invalid payload. stateful sessions not enabled")
        if self._ends.get(session, 0.0) <= self._clock.wall():
            raise ApiError.invalid(f"Bad request: session not found: {session}")

    def close(self, session: str) -> None:
        self.check(session)
        del self._ends[session]


async def answer_session(call: Call, sessions: Sessions) -> bool:
    """Open or close a session if the body asks for it; False otherwise. Raises `ApiError`."""
    body, session = call.json(), call.header(_SESSION)
    wanted = body.get("requestType")
    if wanted is None:
        if session is not None:
            sessions.check(session)
        return False
    if wanted not in ("NEW_SESSION", "CLOSE") or len(body) > 1:
        raise ApiError.invalid("requestType must be the only member, and NEW_SESSION or CLOSE")
    if not sessions.enabled:
        raise ApiError.invalid("Invalid payload. stateful sessions not enabled")
    if wanted == "CLOSE":
        sessions.close(session or "")
        text, head = f"Session {session} closed", (_CLOSED, (session or "").encode())
    else:
        session, ends = sessions.open()
        text = f"Session {session} created"
        head = (_NEW, f"{session}; Expires={ends:%Y-%m-%dT%H:%M:%SZ}".encode())
    await call.respond_raw(text.encode(), 200, [head])
    return True


def name_adapter(call: Call) -> dict[str, Any]:
    """Put the header's adapter into the body in place of its model, also if there is none, and return it."""
    body = {**call.json(), "model": call.header(_ADAPTER)}
    call.body = json.dumps(body).encode()
    return body
