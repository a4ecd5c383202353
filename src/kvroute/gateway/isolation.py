"""Which requests are for LoRA adapters, and the key space in LMCache that each of them gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvroute.errors import InvalidRequest
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerId
from kvroute.openai.endpoints import Isolation
from kvroute.openai.isolation import check_can_be_isolated, client_salt, isolated, key_space
from kvroute.openai.prompt import cache_salt_of
from kvroute.openai.request import InferenceRequest

_NOT_NEEDED = Isolation.NOT_NEEDED  # a member asked of its class costs 80 ns each time


class Adapter(NamedTuple):
    """A LoRA adapter of the fleet. `revision` is what most of its workers have loaded; `others` are the
    workers that have another one, or under whose name of it there is a model that is no adapter (None)."""

    name: str
    revision: str
    others: Mapping[WorkerId, str | None]


class AdapterIsolation:
    """Reads the fleet. Mutable: remembers what it read, until the fleet changes. With `enabled` False there
    are no adapters for it.

    Whether a worker has LMCache cannot be known from outside with certainty (its metrics show it in some
    releases only), so every adapter is isolated: without LMCache that costs nothing but the bytes.
    """

    def __init__(self, fleet: Fleet, *, enabled: bool) -> None:
        self._fleet = fleet
        self._enabled = enabled
        self._version = -1
        self._any = False
        self._adapters: dict[str, Adapter | None] = {}

    @property
    def is_active(self) -> bool:
        """Whether the fleet has adapters now, so that a request's content decides whether it is changed."""
        self._refresh()
        return self._any

    def adapter(self, model: str) -> Adapter | None:
        """`model` is the name that workers know; None where it is no adapter of any of its workers."""
        self._refresh()
        if not self._any:
            return None
        if model not in self._adapters:
            found = self._read(model)
            if found is None and not self._fleet.view(model).workers:
                return None  # names come from clients: only those that exist may take up memory
            self._adapters[model] = found
        return self._adapters[model]

    def salt(self, request: InferenceRequest, model: str) -> str:
        """The `cache_salt` that the request is sent with ("" for none), but to `Adapter.others`. `model` is
        the name that workers know. Of a request that `bodies` refuses, any."""
        adapter = self.adapter(model)
        if adapter is None or request.endpoint.isolation is _NOT_NEEDED:
            return cache_salt_of(request)
        try:
            return key_space(client_salt(request), adapter.name, adapter.revision)
        except InvalidRequest:
            return ""

    def predicts(self, worker: WorkerId, model: str) -> bool:
        """Whether requests for `model` go to the worker with the `salt` that predictions are made for."""
        adapter = self.adapter(model)
        return adapter is None or worker not in adapter.others

    def bodies(
        self, request: InferenceRequest, body: bytes, adapter: Adapter
    ) -> tuple[bytes, Mapping[WorkerId, bytes] | None]:
        """What is sent instead of `body`, and to which workers something else (None: to none).

        Raises InvalidRequest; AdapterNotIsolated if the body cannot be changed.
        """
        if request.endpoint.isolation is _NOT_NEEDED:
            return body, None
        check_can_be_isolated(request)
        salt = client_salt(request)
        made: dict[str | None, bytes] = {None: body}
        for revision in {adapter.revision, *adapter.others.values()} - {None}:
            assert revision is not None
            made[revision] = isolated(body, request, key_space(salt, adapter.name, revision))
        others = {worker: made[revision] for worker, revision in adapter.others.items()}
        return made[adapter.revision], others or None

    def _refresh(self) -> None:
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._adapters.clear()
            self._any = self._enabled and any(worker.facts.adapters for worker in self._fleet.workers())

    def _read(self, model: str) -> Adapter | None:
        revisions = {
            worker.id: worker.adapter_revision(model)
            for worker in self._fleet.workers()
            if worker.serves(model)
        }
        counts = Counter(revision for revision in revisions.values() if revision is not None)
        if not counts:
            return None
        # Of equally many the first by name: every gateway must choose alike to predict alike.
        usual = min(counts, key=lambda revision: (-counts[revision], revision))
        others = {worker: revision for worker, revision in revisions.items() if revision != usual}
        return Adapter(model, usual, others)
