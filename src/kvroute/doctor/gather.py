"""Reads workers, event streams, gateway, LMCache servers and Redis, and sends the probes. Judges nothing."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import redis.asyncio
from redis.exceptions import RedisError

from kvroute.doctor.event_probe import EventTap, why_closed, why_no_replay
from kvroute.doctor.observations import (
    CacheServerSeen,
    Deployment,
    GatewaySeen,
    Observations,
    ProbePair,
    RedisSeen,
    Reply,
    Stream,
    WorkerSeen,
    cache_config,
    counted_hits,
    metric,
)
from kvroute.events.options import KvEventSource, configured_sources, parse_sources
from kvroute.fleet.model_layers import has_hybrid_name, is_hybrid
from kvroute.fleet.probe import in_words, is_refusal
from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, ModelsPage, WorkerSpec, parse_models

TIMEOUT_S = 5.0
"""Longest wait for one answer, except for those of probes."""
PROBE_TIMEOUT_S = 60.0
_EVENT_PROMPTS = 3
_EVENT_WAIT_S = 2.0
"""For an event of each of these prompts."""
_PREDICTION_WAIT_S = 5.0
_POLL_S = 0.1
_PROBED_BLOCKS = 3
_HISTORY_WORDS = 400
"""A shorter prompt may move to another worker, because its cache is worth little."""
SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich - 1234567890",
    "def f(x):\n    return {'a': [x, 1.5e-3]}  # 数据 \U0001f600",
)
"""Texts whose token ids are compared: plain words, other alphabets, code."""

CompareTokenizer = Callable[[str, str, str], Awaitable[str | None]]
"""(model, root, worker's URL) -> how the gateway's tokenizer differs from the worker's; "" if it does not,
None if the gateway has no files of the model."""


class Gatherer:
    """Gathers `Observations` of one deployment. `client` belongs to the caller.

    `seed` makes the probes' prompts new in each run. Mutable: counts the probes.
    """

    def __init__(
        self,
        deployment: Deployment,
        client: httpx.AsyncClient,
        *,
        compare: CompareTokenizer | None = None,
        probes: bool = True,
        seed: int | None = None,
    ) -> None:
        self._deployment = deployment
        self._client = client
        self._compare = compare
        self._probes = probes
        self._random = random.Random(seed)
        key = deployment.worker_key
        self._worker_headers = {"authorization": f"Bearer {key}"} if key else {}

    async def gather(self) -> Observations:
        """Read everything, then send the probes, one worker after another. Raises no error of a server."""
        deployment = self._deployment
        gateway = await self._gateway(deployment.gateway_url) if deployment.gateway_url else None
        workers = list(await asyncio.gather(*(self._worker(spec) for spec in deployment.workers)))
        if self._probes:
            workers = [await self._probed(seen, gateway) for seen in workers]
            if gateway is not None and gateway.ready.status and not deployment.reads_caches:
                workers = await self._predictions_by_history(workers, gateway)
        if gateway is not None and gateway.ready.status:
            gateway = await self._after_probes(gateway)
        url = deployment.lmcache.l2.redis_url
        store = await self._redis(url.get_secret_value()) if url is not None else None
        return Observations(tuple(workers), gateway, store)

    # Workers

    async def _worker(self, spec: WorkerSpec) -> WorkerSeen:
        health = await self._get(spec.url + "/health")
        if not health.is_ok:
            return WorkerSeen(spec, health)
        version, models, metrics = await asyncio.gather(
            self._get(spec.url + "/version"),
            self._get(spec.url + "/v1/models", self._worker_headers),
            self._get(spec.url + "/metrics"),
        )
        page = metrics.body.decode("utf-8", "replace") if metrics.is_ok else ""
        listed = _models(models)
        seen = WorkerSeen(
            spec,
            health,
            version if version.is_ok else Reply(version.status, trouble=version.problem),
            models,
            listed,
            metrics,
            cache_config(page),
            metric(page, "process_start_time_seconds"),
            has_lmcache_inside="\nlmcache:" in page,
            hybrid_model=await asyncio.to_thread(_hybrid_model, listed),
        )
        if not self._deployment.reads_caches:
            return seen
        reply, sources = await self._sources(spec)
        streams = await asyncio.gather(*(self._stream(source) for source in sources))
        samples = await self._samples(seen)
        return replace(
            seen,
            sources_reply=reply,
            publishes=bool(sources),
            streams=tuple(streams),
            samples=samples,
            tokenizer_trouble=await self._tokenizer_trouble(seen) if samples else None,
        )

    async def _sources(self, spec: WorkerSpec) -> tuple[Reply | None, list[KvEventSource]]:
        options = self._deployment.kv_events
        sources = configured_sources(options, spec)
        if sources:
            return None, sources
        reply = await self._get(spec.url + "/kv_event_sources", self._worker_headers)
        if not reply.is_ok:
            return reply, []
        try:
            return reply, parse_sources(reply.body, options, spec)
        except ValueError as error:
            return Reply(reply.status, trouble=f"is no list of event sources: {error}"), []

    async def _stream(self, source: KvEventSource) -> Stream:
        connects = source.bind_index is not None
        trouble = "" if connects else await why_closed(source.endpoint)
        replay = None
        if source.replay_endpoint is not None:
            replay = await why_no_replay(
                source.replay_endpoint, self._deployment.kv_events.replay_timeout_s + 1
            )
        return Stream(
            source.rank,
            source.endpoint,
            source.replay_endpoint,
            connects,
            trouble,
            replay_trouble=replay,
        )

    async def _samples(self, seen: WorkerSeen) -> dict[str, tuple[int, ...]]:
        samples: dict[str, tuple[int, ...]] = {}
        for model in seen.base_models[:1]:
            for text in SAMPLES:
                reply = await self._post(
                    seen.spec.url + "/tokenize", {"model": model, "prompt": text}, self._worker_headers
                )
                tokens = _object(reply).get("tokens")
                if isinstance(tokens, list):
                    samples[text] = tuple(tokens)
        return samples

    async def _tokenizer_trouble(self, seen: WorkerSeen) -> str | None:
        if self._compare is None or seen.models is None or not seen.base_models:
            return None
        model = seen.base_models[0]
        root = next((card.get("root") for card in seen.models.cards if card["id"] == model), "")
        return await self._compare(model, str(root or ""), seen.spec.url)

    # Probes

    async def _probed(self, seen: WorkerSeen, gateway: GatewaySeen | None) -> WorkerSeen:
        if not seen.answers or not self._deployment.uses_caches:
            return seen
        with ExitStack() as stack:
            taps = {}
            for stream in seen.streams:
                if not stream.connects_to_gateway and not stream.trouble:
                    taps[stream.endpoint] = stack.enter_context(EventTap(stream.endpoint))
            if taps:
                await asyncio.sleep(_POLL_S)  # a subscription takes effect after a round trip
            pair = await self._pair(seen, gateway)
            if pair.trouble:
                return replace(seen, pair=pair)
            for _ in range(_EVENT_PROMPTS - 1):
                # One rank answers: the streams of the other ranks may stay silent.
                if not taps or await _heard(taps.values()):
                    break
                # The publisher drops what it sends before it has read the subscription, which takes it
                # as long as its machine is busy: only a later prompt shows that it sends nothing.
                await self._probe(seen.spec.url, self._probe_body(seen), self._worker_headers)
            else:
                await _heard(taps.values())
            streams = tuple(
                replace(stream, messages=taps[stream.endpoint].messages)
                if stream.endpoint in taps
                else stream
                for stream in seen.streams
            )
        return replace(seen, pair=pair, streams=streams)

    async def _pair(self, seen: WorkerSeen, gateway: GatewaySeen | None) -> ProbePair:
        if not seen.base_models:
            return ProbePair("the worker names no model")
        body = self._probe_body(seen)
        first_reply = await self._probe(seen.spec.url, body, self._worker_headers)
        if not first_reply.is_ok:
            return ProbePair(f"/v1/completions {first_reply.problem}")
        predicted = None
        if gateway is not None and gateway.ready.is_ok and self._deployment.reads_caches:
            predicted = await self._predicted(gateway, seen, body)
        hits_before = await self._hits(seen.spec.url)
        second_reply = await self._probe(seen.spec.url, body, self._worker_headers)
        if not second_reply.is_ok:
            return ProbePair(f"/v1/completions {second_reply.problem}")
        hits_after = await self._hits(seen.spec.url)
        return ProbePair(
            "",
            _usage(second_reply).get("prompt_tokens") or 0,
            _reported(second_reply),
            None if hits_before is None or hits_after is None else hits_after - hits_before,
            predicted,
        )

    def _probe_body(self, seen: WorkerSeen, least_words: int = 0) -> dict[str, Any]:
        block = seen.cache.block_size or ASSUMED_BLOCK_TOKENS
        words = max(least_words, _PROBED_BLOCKS * block + block // 2)
        model = seen.base_models[0]
        cards = seen.models.cards if seen.models is not None else ()
        longest = next((card.get("max_model_len") for card in cards if card["id"] == model), None)
        if isinstance(longest, int):
            words = min(words, longest // 4)
        # A word of one letter is one token in most vocabularies, and two or three in the others.
        prompt = " ".join(self._random.choices("abcdefghijklmnopqrstuvwxyz", k=words))
        return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}

    async def _probe(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
        return await self._post(url + "/v1/completions", body, headers, timeout_s=PROBE_TIMEOUT_S)

    async def _hits(self, url: str) -> int | None:
        reply = await self._get(url + "/metrics")
        return counted_hits(reply.body.decode("utf-8", "replace")) if reply.is_ok else None

    async def _predicted(self, gateway: GatewaySeen, seen: WorkerSeen, body: Mapping[str, Any]) -> int | None:
        """The tokens that the gateway expects on the worker; waits a moment for events to arrive there."""
        deadline = time.monotonic() + _PREDICTION_WAIT_S
        while True:
            reply = await self._post(gateway.url + "/v1/route/explain", body, self._client_headers())
            ranking = _object(reply).get("ranking")
            entries = ranking if isinstance(ranking, list) else []
            matched = next(
                (entry.get("matched_tokens") for entry in entries if entry.get("worker") == seen.spec.id),
                None,
            )
            if matched or matched is None or time.monotonic() > deadline:
                return matched
            await asyncio.sleep(_POLL_S)

    async def _predictions_by_history(
        self, workers: Sequence[WorkerSeen], gateway: GatewaySeen
    ) -> list[WorkerSeen]:
        """Send pairs through the gateway, and note what it predicted for the second one on each worker.

        A strategy that remembers its own requests learns nothing from probes that bypass it.
        """
        missing = {
            str(seen.spec.id): seen
            for seen in workers
            if seen.pair is not None and not seen.pair.trouble and self._deployment.uses_caches
        }
        done: dict[str, WorkerSeen] = {}
        for _ in range(3 * len(missing)):
            if not missing:
                break
            body = self._probe_body(next(iter(missing.values())), _HISTORY_WORDS)
            first_worker = ""
            for is_second in (False, True):
                reply, headers = await self._through(gateway, body)
                worker = headers.get("x-kvroute-worker", "")
                if not reply.is_ok or worker not in missing or (is_second and worker != first_worker):
                    break
                first_worker = worker
                if is_second:
                    seen = missing.pop(worker)
                    assert seen.pair is not None
                    hit = headers.get("x-kvroute-hit-tokens", "")
                    predicted = int(hit) if hit.isdecimal() else None
                    done[worker] = replace(seen, pair=replace(seen.pair, predicted=predicted))
        return [done.get(seen.spec.id, seen) for seen in workers]

    async def _through(
        self, gateway: GatewaySeen, body: Mapping[str, Any]
    ) -> tuple[Reply, Mapping[str, str]]:
        headers: dict[str, str] = {}
        reply = await self._post(
            gateway.url + "/v1/completions",
            body,
            self._client_headers(),
            timeout_s=PROBE_TIMEOUT_S,
            headers_into=headers,
        )
        return reply, headers

    # The gateway

    def _client_headers(self) -> dict[str, str]:
        key = self._deployment.client_key
        return {"authorization": f"Bearer {key}"} if key else {}

    async def _admin(self, url: str, path: str) -> Reply:
        key = self._deployment.admin_key
        return await self._get(url + path, {"authorization": f"Bearer {key}"} if key else {})

    async def _gateway(self, url: str) -> GatewaySeen:
        ready = await self._get(url + "/ready")
        if ready.status not in (200, 503):
            return GatewaySeen(url, ready)
        version, models, index = await asyncio.gather(
            self._get(url + "/version"),
            self._get(url + "/v1/models", self._client_headers()),
            self._admin(url, "/admin/index"),
        )
        return GatewaySeen(url, ready, str(_object(version).get("version", "")), models, admin=index.is_ok)

    async def _after_probes(self, gateway: GatewaySeen) -> GatewaySeen:
        """Read what the gateway says about streams and LMCache, now that requests have been made."""
        url = gateway.url
        ready, metrics, index, decisions, audit = await asyncio.gather(
            self._get(url + "/ready"),
            self._get(url + "/metrics"),
            self._admin(url, "/admin/index"),
            self._admin(url, "/admin/decisions?limit=1000"),
            self._admin(url, "/admin/audit"),
        )
        caches = _mapping(_object(index).get("caches"))
        places = _mapping(caches.get("workers"))
        lmcache = _mapping(caches.get("lmcache"))
        page = metrics.body.decode("utf-8", "replace") if metrics.is_ok else ""
        descriptors = metric(page, "process_max_fds")
        texts = {
            "ready.json": ready,
            "metrics.txt": metrics,
            "index.json": index,
            "decisions.json": decisions,
            "audit.json": audit,
        }
        return replace(
            gateway,
            ready=ready,
            notes=tuple(str(note) for note in _object(ready).get("notes") or ()),
            trust_notes={
                worker: "; ".join(
                    ": ".join(str(text) for text in (described["why"], described.get("note")) if text)
                    for described in described_places
                    if described.get("why")
                )
                for worker, described_places in places.items()
            },
            lmcache_known="lmcache" in caches,
            problems=tuple(lmcache.get("problems") or ()),
            instances=tuple(lmcache.get("instances") or ()),
            uncompared=tuple(lmcache.get("uncompared") or ()),
            servers=tuple(
                await asyncio.gather(*(self._cache_server(server) for server in lmcache.get("servers") or ()))
            ),
            max_fds=None if descriptors is None else int(descriptors),
            texts={
                name: reply.body.decode("utf-8", "replace") for name, reply in texts.items() if reply.is_ok
            },
        )

    async def _cache_server(self, described: Mapping[str, Any]) -> CacheServerSeen:
        url = str(described.get("url") or "")
        server_seen = CacheServerSeen(
            str(described.get("id")),
            url,
            tuple(described.get("workers") or ()),
            str(described.get("doubt") or ""),
        )
        if not url:
            return replace(server_seen, trouble="it has registered no address")
        status, health = await asyncio.gather(self._get(url + "/status"), self._get(url + "/healthcheck"))
        return replace(
            server_seen,
            trouble=status.problem,
            status=_object(status) if status.is_ok else None,
            healthy=health.is_ok if health.status else None,
        )

    # Redis

    async def _redis(self, url: str) -> RedisSeen:
        options = self._deployment.lmcache.l2
        parts = urlsplit(url)
        where = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
        tls: dict[str, Any] = {}
        if options.uses_tls and options.tls.ca_file is not None:
            tls = {"ssl_ca_certs": str(options.tls.ca_file), "ssl_check_hostname": True}
        password = options.redis_password
        client = redis.asyncio.Redis.from_url(
            url,
            password=password.get_secret_value() if password else None,
            socket_connect_timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            **tls,
        )
        try:
            info = await client.info("memory")
        except (RedisError, OSError, TimeoutError) as error:
            return RedisSeen(where, _redis_trouble(error))
        finally:
            await client.aclose()
        return RedisSeen(
            where,
            used_bytes=int(info.get("used_memory", 0)),
            max_bytes=int(info.get("maxmemory", 0)),
            policy=str(info.get("maxmemory_policy", "")),
        )

    # HTTP

    async def _get(self, url: str, headers: Mapping[str, str] | None = None) -> Reply:
        return await self._call(self._client.get(url, headers=headers), TIMEOUT_S)

    async def _post(
        self,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        timeout_s: float = TIMEOUT_S,
        headers_into: dict[str, str] | None = None,
    ) -> Reply:
        call = self._client.post(url, json=body, headers=headers, timeout=timeout_s)
        return await self._call(call, timeout_s, headers_into)

    async def _call(
        self, call: Awaitable[httpx.Response], timeout_s: float, headers_into: dict[str, str] | None = None
    ) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call
        except (TimeoutError, httpx.TimeoutException):
            return Reply(0, trouble=f"gave no answer within {timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Reply(0, trouble=_http_trouble(error))
        if headers_into is not None:
            headers_into.update(answer.headers)
        skew = None
        with suppress(TypeError, ValueError):
            skew = parsedate_to_datetime(answer.headers.get("date", "")).timestamp() - time.time()
        return Reply(answer.status_code, answer.content, clock_skew_s=skew)


async def _heard(taps: Collection[EventTap]) -> bool:
    """Whether an event has arrived at one of the taps; waits a moment for the first."""
    deadline = time.monotonic() + _EVENT_WAIT_S
    while not sum(tap.read() for tap in taps):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _http_trouble(error: Exception) -> str:
    return "refuses connections" if is_refusal(error) else f"cannot be reached ({in_words(error)})"


def _redis_trouble(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, redis.exceptions.AuthenticationError):
        return "refuses the password"
    return f"cannot be reached ({text})"


def _models(reply: Reply) -> ModelsPage | None:
    if not reply.is_ok:
        return None
    try:
        return parse_models(reply.body)
    except ValueError:
        return None


def _object(reply: Reply) -> dict[str, Any]:
    """The JSON object of a 2xx answer; empty otherwise."""
    if not reply.is_ok:
        return {}
    try:
        return _mapping(json.loads(reply.body))
    except (ValueError, RecursionError):
        return {}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _usage(reply: Reply) -> dict[str, Any]:
    return _mapping(_object(reply).get("usage"))


def _reported(reply: Reply) -> int | None:
    cached = _mapping(_usage(reply).get("prompt_tokens_details")).get("cached_tokens")
    return cached if isinstance(cached, int) else None


_MOST_CONFIG_BYTES: Final = 1_048_576


def _hybrid_model(models: ModelsPage | None) -> str:
    """See `WorkerSeen.hybrid_model`. Reads the `config.json` of a model in a folder of this host."""
    for card in () if models is None else models.cards:
        root = card.get("root")
        if not isinstance(root, str) or card.get("parent") is not None:
            continue
        if has_hybrid_name(root):
            return f"{root} has layers of several kinds"
        path = Path(root) / "config.json"
        try:
            with path.open("rb") as file:
                config = json.loads(file.read(_MOST_CONFIG_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and is_hybrid(config):
            return f"{path} has layers of several kinds"
    return ""
