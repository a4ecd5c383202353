"""From a parsed request to a routing decision: synchronous, nothing is sent, nothing is accounted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BLOCK_BYTES, BYTES_PER_TOKEN, CacheSpace, PromptKeys
from kvroute.errors import InvalidRequest, NoRoutableWorker
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import FleetView, WorkerId
from kvroute.gateway.access import SessionKeySource, session_key
from kvroute.gateway.downstream import Headers, header
from kvroute.gateway.preparation import Adapter, AdapterIsolation, Prepared
from kvroute.openai.endpoints import Endpoint, ErrorShape
from kvroute.openai.isolation import check_uses_no_key_space
from kvroute.openai.members import with_model
from kvroute.openai.prompt import AnyPrompt, Prompt
from kvroute.openai.request import InferenceRequest, cache_salt_of, prompts_of
from kvroute.routing.router import Router
from kvroute.routing.strategy import ExactPrompt, Needs, RouteDecision, RouteQuery, Strategy
from kvroute.tokens.estimate import TokenEstimator

STRATEGY_HEADER = b"x-kvroute-strategy"


# A member asked of its class costs 80 ns each time (CPython 3.11), these almost nothing.
_SESSION_KEY, _PROMPT, _TOKENS = Needs.SESSION_KEY, Needs.PROMPT, Needs.TOKENS

_ANCHORED_BYTES = 16_384
"""Longer prompts have most of their keys made while they are routed, shorter ones are hashed as quickly."""


class RequestPlan(Struct, eq=False, gc=False):
    """What is going to happen to one request; not changed once made.

    `model` is the name its workers know it by, `target` path and query as they came; `stores_response`
    and `errors` are the endpoint's.
    """

    method: bytes
    target: bytes
    body: bytes
    model: str
    prompts: Sequence[AnyPrompt]
    query: RouteQuery
    decision: RouteDecision
    stores_response: bool = False
    errors: ErrorShape = ErrorShape.OPENAI
    other_bodies: Mapping[WorkerId, bytes] | None = None
    """What these workers are sent instead of `body`: they have another revision of the adapter."""
    is_isolated: bool = False
    """Whether `body` was put into a LoRA adapter's key space."""

    def body_for(self, worker: WorkerId) -> bytes:
        """What the worker is sent."""
        return self.body if self.other_bodies is None else self.other_bodies.get(worker, self.body)


class _Known(NamedTuple):
    """What all requests for one name have in common until the fleet changes."""

    model: str
    view: FleetView
    strategy: Strategy
    needs: Needs
    space: CacheSpace
    isolates: bool
    """Whether the fleet has adapters that are isolated."""
    adapter: Adapter | None


ContentRule: TypeAlias = Callable[[], str]
"""Says what of the gateway depends on what a body says, "" where nothing does at the moment."""


class Planner:
    """Reads fleet, router and estimator, changes none of them. `plan` is a pure function of their state.
    `content_rules` are asked before a body travels unread; `session_fields` are fields of bodies that
    `session_keys` look at."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        estimator: TokenEstimator,
        session_keys: Sequence[SessionKeySource],
        *,
        allow_strategy_header: bool,
        session_fields: Sequence[str] = (),
        content_rules: Sequence[ContentRule] = (),
        isolation: AdapterIsolation,
    ) -> None:
        self._fleet = fleet
        self._isolation = isolation
        self._router = router
        self._estimator = estimator
        self._session_keys = tuple(session_keys)
        self._reads_session = bool(session_fields)
        self._content_rules = tuple(content_rules)
        self._version = -1
        self._known: dict[str | None, _Known] = {}
        """By the name asked for, as of this version of the fleet: of models that exist, as clients name
        them."""
        self._allow_strategy_header = allow_strategy_header
        self.may_need_tokens = allow_strategy_header or router.may_need(Needs.TOKENS)
        """Whether `unprepared` has ever anything to say."""
        self.may_need_headers = allow_strategy_header or router.may_need(Needs.SESSION_KEY)
        """Whether the requests' headers matter to `plan`; with none of its options else."""

    @property
    def isolates_adapters(self) -> bool:
        """Whether the fleet has LoRA adapters whose requests are changed: then a body has to be read."""
        return self._isolation.is_active

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
    ) -> RequestPlan:
        """Choose. `owner` is the worker that holds the stored response which the request continues;
        `with_session` looks for a session key even if the strategy does not ask for one; `prepared` is what
        `unprepared` asked for.

        Raises ModelNotFound, InvalidRequest (no model named and several to choose from, or an unknown
        strategy asked for) and NoRoutableWorker.
        """
        asked, body = request.model, request.body
        known = self._known.get(asked) if self._version == self._fleet.version else None
        if known is None:
            known = self._look_up(asked)
        model, view, strategy, needs, space, isolates, adapter = known
        if asked is not None and model != asked:
            body = with_model(request, model)
        others, is_isolated = None, False
        if isolates:
            check_uses_no_key_space(request)
            if adapter is not None:
                plain = body
                body, others = self._isolation.bodies(request, body, adapter)
                is_isolated = body is not plain
        if not view.workers:
            raise NoRoutableWorker(
                f"No routable worker serves the model {model!r} at the moment.", retry_after_s=1
            )
        if self._allow_strategy_header:
            strategy = self._strategy(model, headers)
            needs = strategy.needs
        session = None
        if with_session or needs is _SESSION_KEY:
            session = session_key(self._session_keys, request, headers)
        prompts = prompts_of(request) if needs is _PROMPT or needs is _TOKENS else ()
        if is_isolated:
            space = CacheSpace(model, self._isolation.salt(request, model))
        elif request.cache_salt is not None and (salt := cache_salt_of(request)):
            space = CacheSpace(model, salt)
        exact = () if prepared is None else prepared.prompts
        if len(prompts) == 1 and (prepared is None or len(exact) == 1):  # as `_query`, for most requests
            prompt, seed = prompts[0], space.seed
            keys = self._estimator.prompt_keys(prompt, space)
            if exact:
                keys = _measured(keys, prompt, exact[0])
            fingerprint = seed ^ _fingerprint(prompt, keys, seed)
            query = RouteQuery(model, now, (keys,), keys.tokens, session, request.stream, fingerprint, exact)
        else:
            query = self._query(request, space, now, prompts, session, prepared)
        decision = None
        if owner is not None:
            decision = self._router.pinned(query, view, owner)
        if decision is None:
            decision = self._router.decide(query, view, strategy)
        endpoint = request.endpoint
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
            others,
            is_isolated,
        )

    def why_read(self, endpoint: Endpoint) -> str:
        """Why a body must be read before it is forwarded; "" where nothing depends on what it says, so that
        one which is over a limit may travel unread."""
        if len(self._fleet.catalog.names) > 1:
            return "the model decides where it goes: there are several names"
        if self._isolation.is_active:
            return "an adapter's request gets a key space of its own"
        if endpoint.stores_response:
            return "it may continue a stored response"
        if self._reads_session and self._router.may_need(Needs.SESSION_KEY):
            return "it may hold the session key"
        return next((why for rule in self._content_rules if (why := rule())), "")

    def unprepared(self, request: InferenceRequest, headers: Headers) -> str | None:
        """The model whose tokenizer the request's strategy wants to hear before `plan`; None where it can
        be planned at once, or fails to be. Raises what `plan` raises about names."""
        if not self.may_need_tokens or not request.endpoint.fills_kv_cache or request.over:
            return None
        model = self._fleet.resolve(request.model)
        strategy = self._strategy(model, headers)
        return model if strategy.needs is _TOKENS else None

    def _look_up(self, asked: str | None) -> _Known:
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._known.clear()
        model = self._fleet.resolve(asked)
        view = self._fleet.view(model)
        strategy = self._router.strategy(model)
        isolation = self._isolation
        known = self._known[asked] = _Known(
            model,
            view,
            strategy,
            strategy.needs,
            CacheSpace(model),
            isolation.is_active,
            isolation.adapter(model),
        )
        return known

    def _strategy(self, model: str, headers: Headers) -> Strategy:
        asked = self._asked_strategy(headers) if self._allow_strategy_header else None
        return self._router.strategy(model, asked)

    def _asked_strategy(self, headers: Headers) -> str | None:
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
        space: CacheSpace,
        now: float,
        prompts: Sequence[AnyPrompt],
        session: str | None,
        prepared: Prepared | None,
    ) -> RouteQuery:
        model, stream = space.model, request.stream
        exact: tuple[ExactPrompt, ...] = ()
        if prompts:
            keys = tuple([self._estimator.prompt_keys(prompt, space) for prompt in prompts])
            if prepared is not None and len(prepared.prompts) == len(keys):
                exact = prepared.prompts
                keys = tuple(map(_measured, keys, prompts, exact))
            fingerprint, tokens = space.seed, 0
            for prompt, measured in zip(prompts, keys, strict=True):
                tokens += measured.tokens
                fingerprint ^= _fingerprint(prompt, measured, fingerprint)
        else:
            keys = ()
            tokens = int(len(request.body) / BYTES_PER_TOKEN) if request.endpoint.fills_kv_cache else 1
            fingerprint = xxh3_64_intdigest(request.body)
        inexact = "" if exact or prepared is None else prepared.why_not or "unreadable"
        return RouteQuery(model, now, keys, tokens, session, stream, fingerprint, exact, inexact)


def _fingerprint(prompt: AnyPrompt, measured: PromptKeys, seed: int) -> int:
    whole = prompt[0] if type(prompt) is Prompt else None  # its own members are found slowly
    if (prompt.size if whole is None else len(whole)) <= _ANCHORED_BYTES:
        return xxh3_64_intdigest(prompt.data if whole is None else whole, seed)
    chain = measured.keys
    blocks = len(chain)
    hashed = blocks * BLOCK_BYTES
    rest = prompt.after(hashed) if whole is None else memoryview(whole)[hashed:]
    return xxh3_64_intdigest(rest, chain[blocks - 1])


def _measured(keys: PromptKeys, prompt: AnyPrompt, exact: ExactPrompt) -> PromptKeys:
    """The approximate view of a prompt whose tokens are known: its length is no estimate any more."""
    share = BLOCK_BYTES / max(1, prompt.size)
    return PromptKeys(keys.keys, exact.tokens, exact.tokens * share)
