"""Key spaces: whose KV blocks a request may share, by adapter and by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvroute.errors import InvalidRequest
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerId
from kvroute.openai.endpoints import Isolation
from kvroute.openai.request import InferenceRequest, cache_salt_of
from kvroute.openai.rewriting import check_can_be_isolated, client_salt, isolated, key_space

if TYPE_CHECKING:
    pass


_NOT_NEEDED = Isolation.NOT_NEEDED  # to look up an enum member in its class costs 80 ns each time


class Adapter(NamedTuple):
    """A LoRA adapter of the fleet.

    `revision` is the one that most of its workers have loaded. `others` maps each other worker to its own
    revision, or to None if the name is not an adapter there.
    """

    name: str
    revision: str
    others: Mapping[WorkerId, str | None]


class KeySpaces:
    """Decides each request's key space, by its LoRA adapter and its tenant.

    With `adapters` False adapters get none. With `tenants` True every request has a tenant; `needs_tag`: some
    workers have LMCache in classic mode. Mutable: caches the fleet's adapters until the fleet changes.

    A worker's metrics show LMCache in some releases only, so every adapter is isolated. Without LMCache the
    only cost is the added bytes.
    """

    def __init__(
        self, fleet: Fleet, *, adapters: bool, tenants: bool = False, needs_tag: bool = False
    ) -> None:
        self._fleet = fleet
        self._enabled = adapters
        self.isolates_tenants = tenants
        self._needs_tag = needs_tag
        self._version = -1
        self._any = False
        self._adapters: dict[str, Adapter | None] = {}

    @property
    def is_active(self) -> bool:
        """Whether requests may be changed: tenants are isolated, or the fleet has adapters now."""
        self._refresh()
        return self._any or self.isolates_tenants

    def adapter(self, model: str) -> Adapter | None:
        """The adapter with this name (as workers know it); None if it is an adapter on no worker."""
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
        """The `cache_salt` that most workers get for this request; "" for none.

        `model` is the name that workers use. The value has no meaning for a request that `bodies` refuses.
        """
        adapter = self.adapter(model)
        tenant = request.tenant
        if (adapter is None and not tenant) or request.endpoint.isolation is _NOT_NEEDED:
            return cache_salt_of(request)
        name, revision = ("", "") if adapter is None else (adapter.name, adapter.revision)
        try:
            return key_space(client_salt(request), name, revision, tenant)
        except InvalidRequest:
            return ""

    def predicts(self, worker: WorkerId, model: str) -> bool:
        """Return True if the worker gets requests for `model` with the salt that predictions assume."""
        adapter = self.adapter(model)
        return adapter is None or worker not in adapter.others

    def bodies(
        self, request: InferenceRequest, body: bytes, adapter: Adapter | None
    ) -> tuple[bytes, Mapping[WorkerId, bytes] | None]:
        """The body to send instead of `body`, and the bodies for workers that need another one (or None).

        Raises InvalidRequest; AdapterNotIsolated or TenantNotIsolated if the body cannot be changed.
        """
        tenant = request.tenant
        if self.isolates_tenants and not tenant:  # a defect must not let tenants share KV
            raise RuntimeError("a request without a tenant")
        if (adapter is None and not tenant) or request.endpoint.isolation is _NOT_NEEDED:
            return body, None
        check_can_be_isolated(request, needs_tag=self._needs_tag)
        salt = client_salt(request)
        made: dict[str | None, bytes] = {None: body}
        if tenant:
            made[None] = isolated(body, request, key_space(salt, "", "", tenant))
            if adapter is None:
                return made[None], None
        assert adapter is not None
        for revision in {adapter.revision, *adapter.others.values()} - {None}:
            assert revision is not None
            made[revision] = isolated(body, request, key_space(salt, adapter.name, revision, tenant))
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
        # Between equal counts the first name wins, so that all gateways predict the same.
        usual = min(counts, key=lambda revision: (-counts[revision], revision))
        others = {worker: revision for worker, revision in revisions.items() if revision != usual}
        return Adapter(model, usual, others)
