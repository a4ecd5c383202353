"""SageMaker's headers of `/invocations`: the model that is computed, and the worker of a stateful session.

vLLM (0.32, entrypoints/serve/sagemaker/api_router.py, with model-hosting-container-standards 0.1.16)
overwrites the body's `model` with the first header `X-Amzn-SageMaker-Adapter-Identifier`, also if there is
none: then the base model is computed, whatever the body names. `named` resolves the model in the same way and
writes it into the body, so that engines which do not know the header compute the same.

A body `{"requestType": "NEW_SESSION"}` opens a session (SAGEMAKER_ENABLE_STATEFUL_SESSIONS): the answer's
header `X-Amzn-SageMaker-New-Session-Id` has its id, and only the worker that made it knows the id. The
container reads no other headers there: `X-Amzn-SageMaker-Adapter-Alias` only shapes the answers of
`/adapters`, which the gateway does not relay; Custom-Attributes and Target-Model mean nothing to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

from kvroute.errors import InvalidRequest, ModelNotFound, NotFound
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerId
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.headers import Headers, header
from kvroute.openai.request import InferenceRequest
from kvroute.openai.rewriting import TopLevelMember, with_members
from kvroute.relay.stored_responses import ResponseOwners
from kvroute.request.downstream import Downstream, Forwarding
from kvroute.request.record import Record

PATH: Final = "/invocations"
ADAPTER: Final = b"x-amzn-sagemaker-adapter-identifier"
SESSION: Final = b"x-amzn-sagemaker-session-id"
_MODEL: Final = TopLevelMember("model")
_MAX_BYTES: Final = 4_096
_MAX_ID_BYTES: Final = 256
_MAX_SESSION_BODY_BYTES: Final = 4_096
_REQUEST_TYPE: Final = b'"requestType"'
_adapter_lines = re.compile(rb"(?im)^x-amzn-sagemaker-adapter-identifier:[^\n]*\n").sub
_new_session = re.compile(rb"(?im)^x-amzn-sagemaker-new-session-id:[ \t]*([^\s;]{1,256})").search
_is_value = re.compile(r"[\x21-\x7e\x80-\xff]([\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?").fullmatch


def adapter_in(headers: Headers) -> str:
    """The model that the headers name; "" if they name none. Raises ModelNotFound for a long name."""
    value = header(headers, ADAPTER).strip(b" \t")
    if len(value) > _MAX_BYTES:
        raise ModelNotFound(value[:64].decode("latin-1") + "...")
    return value.decode("latin-1")


def with_adapter(fields: bytes, headers: Headers, model: str) -> bytes:
    """The header lines `fields` for a worker, with `model` as the adapter if the client's headers name one.

    `model`: as workers know it. Raises InvalidRequest if a header cannot hold the name.
    """
    if not adapter_in(headers):
        return fields
    if not _is_value(model):
        raise InvalidRequest("The name of this model cannot stand in a header.", param=ADAPTER.decode())
    return b"%b%b: %b\r\n" % (_adapter_lines(b"", fields), ADAPTER, model.encode("latin-1"))


class Invocations:
    """Reads SageMaker's headers. Mutable: `owners` gets the workers of sessions."""

    def __init__(self, fleet: Fleet, owners: ResponseOwners) -> None:
        self._fleet = fleet
        self._owners = owners

    def named(self, request: InferenceRequest, headers: Headers, *, is_sent: bool = True) -> None:
        """Let `request` name the model that workers will compute. Calling it again changes nothing.

        With `is_sent` False the request is only explained, and may be one for another endpoint: then its own
        model counts if the headers name none. Raises ModelNotFound, and what `Fleet.resolve` raises.
        """
        model = adapter_in(headers)
        if _is_about_sessions(request):  # vLLM takes no other member there
            request.model = self._fleet.resolve(model) if model else request.model or self._model_of(headers)
            return
        if not model:
            named = request.model
            if named is None:
                request.model = self._model_of(headers)
                return
            base = self._base(named) if is_sent else None
            if base is None:
                return
            request.also_named, model = named, base
        if request.is_read and model != _member(request):
            there = (request.fields or {}).get("model")
            request.body = with_members(request.body, {_MODEL: there}, {_MODEL: msgspec.json.encode(model)})
            request.forget_members()
        request.model = model

    def owner(self, request: InferenceRequest, headers: Headers) -> WorkerId | None:
        """The worker of the request's session; None if it has no session, or an unknown one.

        Raises NotFound for a session that is not known as one of the request's tenant.
        """
        session = _session_in(headers)
        if not session or _opens(request):
            return None
        owner = self._owners.owner(_key(session, request.tenant))
        if owner is None and request.tenant:
            raise NotFound("The session does not exist.", param=SESSION.decode(), code="session_not_found")
        return owner

    def watched(self, client: Downstream, record: Record, tenant: str) -> Downstream:
        """`client`, or what looks for the id of a new session in the answer on its way there."""

        def opened(session: str) -> None:
            self._owners.remember(_key(session, tenant), WorkerId(record.worker))
            if tenant:
                self._owners.remember(_key(session, ""), WorkerId(record.worker))

        return _Watched(client, opened=opened)

    def _base(self, named: str) -> str | None:
        """The base model of the adapter `named`; None if it is none."""
        model = self._fleet.resolve(named)
        bases = (_base_on(worker, model) for worker in self._fleet.workers() if worker.serves(model))
        return next((base for base in bases if base is not None), None)

    def _model_of(self, headers: Headers) -> str | None:
        """A base model of the worker that has the session."""
        owner = self._owners.owner(_key(_session_in(headers), ""))
        for worker in self._fleet.workers():
            if worker.id == owner:
                adapters = {name for name, _ in worker.facts.adapters}
                return min(worker.models - adapters, default=None)
        return None


class _Watched(Forwarding, kw_only=True):
    """Passes an answer on to a client, and its new session's id to `opened`."""

    opened: Callable[[str], None]

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        self._look(status, fields)
        self._client.start_relayed(status, fields, is_sized=is_sized)

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        self._look(status, fields)
        self._client.answer(status, fields, body, is_sized)

    def write(self, chunk: bytes) -> None:
        self._client.write(chunk)

    def framed_writer(self) -> Callable[[bytes], None] | None:
        return self._client.framed_writer()

    def finish(self, chunk: bytes = b"") -> None:
        self._client.finish(chunk)

    def _look(self, status: int, fields: bytes) -> None:
        found = _new_session(fields) if status == 200 else None
        if found is not None:
            self.opened(found[1].decode("latin-1"))


def _is_about_sessions(request: InferenceRequest) -> bool:
    """Whether the request opens or closes a session."""
    body = request.body
    if len(body) > _MAX_SESSION_BODY_BYTES or body.find(_REQUEST_TYPE) < 0:
        return False
    return request.is_read and "requestType" in (request.fields or {})


def _opens(request: InferenceRequest) -> bool:
    return _is_about_sessions(request) and request.text("requestType") == "NEW_SESSION"


def _member(request: InferenceRequest) -> str | None:
    """The model that the body names now."""
    raw: Raw | None = (request.fields or {}).get("model")
    try:
        return None if raw is None else msgspec.json.decode(raw, type=str | None)
    except UNREADABLE:
        return None


def _session_in(headers: Headers) -> str:
    value = header(headers, SESSION)
    return value.decode("latin-1") if len(value) <= _MAX_ID_BYTES else ""


def _key(session: str, tenant: str) -> str:
    """The key of a session among the IDs of stored responses, which contain no NUL."""
    return f"sagemaker\0{tenant}\0{session}"


def _base_on(worker: Worker, model: str) -> str | None:
    return next((parent for name, parent in worker.facts.adapters if name == model), None)
