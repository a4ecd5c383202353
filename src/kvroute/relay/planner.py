"""Turns a parsed request into a routing decision. `Planner` is synchronous, sends and accounts for nothing.

A request that continues a stored response of the Responses API must go to the worker that holds the response:
vLLM keeps it in the process that made it. `StoredResponses` asks the workers for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BLOCK_BYTES, BYTES_PER_TOKEN, CacheSpace, PromptKeys
from kvroute.errors import InvalidRequest, NoRoutableWorker, TenantNotIsolated
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import FleetView, WorkerId, release_shown
from kvroute.openai.endpoints import Endpoint
from kvroute.openai.headers import Headers, header
from kvroute.openai.kv_transfer import can_hand_over, check_params
from kvroute.openai.prompt import AnyPrompt, Prompt
from kvroute.openai.request import InferenceRequest, cache_salt_of, may_direct_engine, prompts_of
from kvroute.openai.rewriting import check_uses_no_key_space, salted_since, with_model
from kvroute.relay.key_spaces import Adapter, KeySpaces
from kvroute.relay.preparation import Prepared
from kvroute.relay.session_keys import SessionId, SessionKeys
from kvroute.request.plan import RequestPlan
from kvroute.routing.router import Router
from kvroute.routing.sessions import hash_of_session
from kvroute.routing.strategy import (
    ExactPrompt,
    Needs,
    RouteQuery,
    Strategy,
)
from kvroute.tokens.estimate import TokenEstimator

STRATEGY_HEADER = b"x-kvroute-strategy"


# To look up an enum member in its class costs 80 ns each time (CPython 3.11).
_NOTHING, _PROMPT, _TOKENS = Needs.NOTHING, Needs.PROMPT, Needs.TOKENS

_HASH_WHOLE_BYTES = 16_384
"""Prompts up to this size are hashed whole for their fingerprint. For longer ones the last block key, which
routing has computed anyway, replaces the hash of everything before it."""


class _ModelFacts(NamedTuple):
    """What is equal for all requests for one name until the fleet changes."""

    model: str
    canonical: str
    view: FleetView
    strategy: Strategy
    needs: Needs
    space: CacheSpace
    isolates: bool
    """Whether tenants are isolated, or the fleet has adapters that are."""
    adapter: Adapter | None
    has_roles: bool
    """Whether a worker of the fleet is for prefill or for decode only."""


ContentRule: TypeAlias = Callable[[], str]
"""Returns why the gateway must read bodies now; "" if nothing depends on their content."""


class Planner:
    """Plans requests from the state of fleet, router and estimator, without changing that state.

    `content_rules` are checked before a body is forwarded unread. With `trusts_clients` clients may tell
    engines where to read KV, unless the fleet has roles. Mutable: caches facts by model until the
    fleet changes.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        estimator: TokenEstimator,
        session_keys: SessionKeys,
        *,
        allow_strategy_header: bool,
        content_rules: Sequence[ContentRule] = (),
        isolation: KeySpaces,
        trusts_clients: bool = False,
    ) -> None:
        self._fleet = fleet
        self._isolation = isolation
        self._trusts_clients = trusts_clients
        self._router = router
        self._estimator = estimator
        self._session_keys = session_keys
        self._content_rules = tuple(content_rules)
        self._version = -1
        self._models: dict[str | None, _ModelFacts] = {}
        """Facts by requested name, for models that exist in this version of the fleet."""
        self._allow_strategy_header = self.allows_strategy_header = allow_strategy_header
        self.may_need_tokens = allow_strategy_header or router.may_need(Needs.TOKENS)
        """Whether `model_to_tokenize` may ever return a model."""
        self.hands_over = True
        """Whether prompts may be computed by another worker than their answers (`prefill_decode`)."""

    def set_session_keys(self, session_keys: SessionKeys) -> None:
        """Read session keys from these sources from now on."""
        self._session_keys = session_keys

    @property
    def isolates(self) -> bool:
        """Whether requests of tenants or LoRA adapters are changed, so that bodies must be read."""
        return self._isolation.is_active

    @property
    def isolates_tenants(self) -> bool:
        """Whether every request needs a tenant."""
        return self._isolation.isolates_tenants

    def plan(
        self,
        request: InferenceRequest,
        target: bytes,
        headers: Headers,
        now: float,
        owner: WorkerId | None = None,
        prepared: Prepared | None = None,
        *,
        with_session: bool = False,
        fields: bytes = b"",
    ) -> RequestPlan:
        """Make the routing decision for `request`.

        `owner` is the worker that holds the stored response which the request continues. `with_session` reads
        the session key even if the strategy does not need it. `prepared` has the tokens for
        `model_to_tokenize`. `fields` are the header lines that workers get: a data-parallel rank in them is
        kept.

        Raises ModelNotFound, InvalidRequest (the request names no model and there are several, or it names an
        unknown strategy), OverLimit, TenantNotIsolated and NoRoutableWorker.
        """
        requested, body = request.model, request.body
        facts = self._models.get(requested) if self._version == self._fleet.version else None
        if facts is None:
            facts = self._resolve(requested)
        model, canonical, view, strategy, needs, space, isolates, adapter, has_roles = facts
        if requested is not None and model != requested:
            body = with_model(request, model)
        other_bodies, is_isolated = None, False
        if isolates:
            check_uses_no_key_space(request)
            plain = body
            if request.tenant:
                view = _honouring_salts(request, view)
            body, other_bodies = self._isolation.bodies(request, body, adapter)
            is_isolated = body is not plain
        if (request.kv_transfer_params is not None or request.engine_members is not None) and (
            has_roles or not self._trusts_clients
        ):
            check_params(request)
        if not view.workers:
            causes = self._fleet.causes(model)
            raise NoRoutableWorker(
                f"No routable worker serves the model {model!r} at the moment. {causes}".rstrip(),
                retry_after_s=1,
            )
        if self._allow_strategy_header:
            strategy = self._strategy(model, canonical, headers)
            needs = strategy.needs
        session = None
        if needs is not _NOTHING or with_session:
            session = self._session_keys.read(request, headers)
            if session is not None and request.tenant:
                session = _of_tenant(request.tenant, session)
        endpoint = request.endpoint
        reads_prompt = needs is _PROMPT or needs is _TOKENS or has_roles
        if reads_prompt and not view.caches_prefixes and endpoint.is_pooling:
            reads_prompt = False  # such an engine keeps no KV between its steps: only load counts
        prompts = prompts_of(request) if reads_prompt else ()
        if is_isolated:
            space = CacheSpace(canonical, self._isolation.salt(request, model))
        elif request.cache_salt is not None and (salt := cache_salt_of(request)):
            space = CacheSpace(canonical, salt)
        can_move = has_roles and self.hands_over and len(prompts) == 1 and can_hand_over(request)
        takes_rank, rank = True, None
        if view.by_rank is not None:
            takes_rank, rank = _rank_of(endpoint, fields)
        query = self._query(
            request, view.model, space, now, prompts, session, prepared, can_move, takes_rank, rank
        )
        decision = None
        if owner is not None:
            decision = self._router.pinned(query, view, owner)
        if decision is None:
            decision = self._router.decide(query, view, strategy)
        return RequestPlan(
            b"POST",
            target,
            body,
            model,
            prompts,
            query,
            decision,
            endpoint.stores_response,
            endpoint.errors,
            other_bodies,
            is_isolated,
            None if decision.handover is None else request,
            has_roles,
            endpoint.preamble,
            canonical,
        )

    def why_body_is_read(self, endpoint: Endpoint) -> str:
        """Why a body must be read before it is forwarded; "" if nothing but its model depends on its content.

        In the second case a body above a limit may be forwarded unread, see `goes_by_model`.
        """
        if self._isolation.is_active:
            return "requests of each adapter and tenant get their own key space"
        if self._fleet.has_roles and endpoint.fills_kv_cache:
            return "it may name the host from which a worker takes KV"
        if endpoint.stores_response:
            return "it may continue a stored response"
        return next((why for rule in self._content_rules if (why := rule())), "")

    def why_not_unread(self, body: bytes, *, is_decodable: bool = True) -> str:
        """Why this body must not be forwarded unread, which otherwise nothing depends on; "" if it may be.

        See `may_direct_engine` for `is_decodable`.
        """
        is_risk = not self._trusts_clients and may_direct_engine(body, is_decodable=is_decodable)
        return "it may name the host from which a worker takes KV" if is_risk else ""

    @property
    def goes_by_model(self) -> bool:
        """Whether the fleet has several names, so that a request's model decides which workers serve it."""
        return len(self._fleet.catalog.names) > 1

    def is_alias(self, requested: str | None) -> bool:
        """Whether workers know the model under another name. Raises the errors of `resolve`."""
        return requested is not None and self._fleet.resolve(requested) != requested

    def resolve(self, requested: str | None) -> str:
        """See `ModelCatalog.resolve`."""
        return self._fleet.resolve(requested)

    def session_of(self, request: InferenceRequest, headers: Headers) -> str | None:
        """The request's session key, whatever the strategy; None if it has none."""
        session = self._session_keys.read(request, headers)
        return None if session is None else session.key

    def model_to_tokenize(self, request: InferenceRequest, headers: Headers) -> str | None:
        """The model whose tokenizer must read the prompt before `plan`; None if no tokens are needed.

        Raises the same errors about names as `plan`.
        """
        if not self.may_need_tokens or not request.endpoint.fills_kv_cache or request.over:
            return None
        model = self._fleet.resolve(request.model)
        if not request.reads_cache or not self._fleet.view(model).caches_prefixes:
            return None
        strategy = self._strategy(model, self._fleet.canonical(model), headers)
        return model if strategy.needs is _TOKENS else None

    def forget_strategies(self) -> None:
        """The configured strategies or aliases have changed: resolve each model again."""
        self._models.clear()

    def _resolve(self, requested: str | None) -> _ModelFacts:
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._models.clear()
        model = self._fleet.resolve(requested)
        canonical, view = self._fleet.canonical(model), self._fleet.view(model)
        strategy = self._router.strategy(self._configured(model, canonical))
        isolation = self._isolation
        facts = self._models[requested] = _ModelFacts(
            model,
            canonical,
            view,
            strategy,
            strategy.needs,
            CacheSpace(canonical),
            isolation.is_active,
            isolation.adapter(model),
            self._fleet.has_roles,
        )
        return facts

    def _strategy(self, model: str, canonical: str, headers: Headers) -> Strategy:
        requested = self._requested_strategy(headers) if self._allow_strategy_header else None
        return self._router.strategy(self._configured(model, canonical), requested)

    def _configured(self, model: str, canonical: str) -> str:
        """The name whose options apply to a request for `model`."""
        return model if self._router.has_options(model) else canonical

    def _requested_strategy(self, headers: Headers) -> str | None:
        name = header(headers, STRATEGY_HEADER).decode("latin-1")
        if name and not self._router.knows(name):
            known = ", ".join(self._router.strategies)
            raise InvalidRequest(
                f"x-kvroute-strategy: {name!r} is none of {known}.", param="x-kvroute-strategy"
            )
        return name or None

    def _query(
        self,
        request: InferenceRequest,
        model: str,
        space: CacheSpace,
        now: float,
        prompts: Sequence[AnyPrompt],
        session: SessionId | None,
        prepared: Prepared | None,
        can_move: bool,
        takes_rank: bool,
        rank: int | None,
    ) -> RouteQuery:
        exact: tuple[ExactPrompt, ...] = ()
        if prepared is not None and len(prepared.prompts) == len(prompts):
            exact = prepared.prompts
        if prompts:
            # One loop and no comprehension, which would make cells of its variables at every request.
            keys_of, fingerprint, tokens = self._estimator.prompt_keys, space.seed, 0
            keys: list[PromptKeys] = []
            for prompt in prompts:
                its = keys_of(prompt, space)
                if exact:
                    its = _with_exact_length(its, prompt, exact[len(keys)])
                keys.append(its)
                tokens += its.tokens
                fingerprint ^= _fingerprint(prompt, its, fingerprint)
        else:
            keys = []
            tokens = int(len(request.body) / BYTES_PER_TOKEN) if request.endpoint.fills_kv_cache else 1
            fingerprint = xxh3_64_intdigest(request.body)
        inexact = "" if exact or prepared is None else prepared.why_not or "unreadable"
        model, key, parent, session_worker, from_parent = space.model, None, None, None, False
        session_hash = 0
        if session is not None:
            key, parent, sessions = session.key, session.parent, self._router.sessions
            session_hash = hash_of_session(model, key)
            session_worker = sessions.worker(session_hash)
            if session_worker is None and parent is not None:
                session_worker = sessions.worker(hash_of_session(model, parent))
                from_parent = session_worker is not None
        return RouteQuery(
            model,
            now,
            tuple(keys),
            tokens,
            key,
            request.stream,
            fingerprint,
            exact,
            inexact,
            can_move,
            session_worker,
            parent,
            request.reads_cache,
            takes_rank,
            rank,
            from_parent,
            session_hash,
        )


_RANK = re.compile(rb"(?:\A|\n)x-data-parallel-rank:([^\r\n]*)", re.IGNORECASE).search


def has_rank(fields: bytes) -> bool:
    """Whether one of these header lines is `X-data-parallel-rank`."""
    return _RANK(fields) is not None


def _honouring_salts(request: InferenceRequest, view: FleetView) -> FleetView:
    """The workers whose release honours `cache_salt` in this request.

    Workers whose release was not read count (`server.isolation_checks_release`). Raises TenantNotIsolated if
    there is none.
    """
    since = salted_since(request)
    if since is None or not view.workers:
        return view
    workers = tuple(each for each in view.workers if each.release is None or each.release >= since)
    if len(workers) == len(view.workers):
        return view
    if not workers:
        have = ", ".join(sorted({release_shown(each.release) for each in view.workers if each.release}))
        raise TenantNotIsolated(
            f"vLLM honours `cache_salt` in {request.endpoint.path} from {release_shown(since)} "
            f"on, and the workers of {view.model!r} have {have}: the request would share KV with other "
            "clients' (server.isolation: per-key)."
        )
    return FleetView(view.model, workers, view.version)


def _rank_of(endpoint: Endpoint, fields: bytes) -> tuple[bool, int | None]:
    """Whether the gateway may choose the data-parallel rank, and the rank that the client has chosen.

    vLLM 0.32 reads the first header `X-data-parallel-rank`; its balancer chooses if that is no number.
    """
    if not endpoint.takes_rank:
        return False, None
    found = _RANK(fields)
    if found is None:
        return True, None
    text = found[1].strip()
    return (True, int(text)) if text.isdigit() and len(text) < _RANK_DIGITS else (False, None)


_RANK_DIGITS = 6


def tenant_session(tenant: str, session: str) -> str:
    """The session key that strategies get for a tenant's session; equal keys of tenants are two sessions."""
    return f"{tenant}\0{session}"


def _of_tenant(tenant: str, session: SessionId) -> SessionId:
    parent = None if session.parent is None else tenant_session(tenant, session.parent)
    return SessionId(tenant_session(tenant, session.key), parent)


def _fingerprint(prompt: AnyPrompt, prompt_keys: PromptKeys, seed: int) -> int:
    whole = prompt[0] if type(prompt) is Prompt else None  # an index is faster than the attribute `data`
    if (prompt.size if whole is None else len(whole)) <= _HASH_WHOLE_BYTES:
        return xxh3_64_intdigest(prompt.data if whole is None else whole, seed)
    chain = prompt_keys.keys
    blocks = len(chain)
    hashed = blocks * BLOCK_BYTES
    rest = prompt.after(hashed) if whole is None else memoryview(whole)[hashed:]
    return xxh3_64_intdigest(rest, chain[blocks - 1])


def _with_exact_length(keys: PromptKeys, prompt: AnyPrompt, exact: ExactPrompt) -> PromptKeys:
    """`keys` with the prompt's exact number of tokens instead of the estimate."""
    share = BLOCK_BYTES / max(1, prompt.size)
    return PromptKeys(keys.keys, exact.tokens, exact.tokens * share)
