"""Judges the gateway, LMCache's servers and L2's Redis. Pure."""

from __future__ import annotations

from kvroute.doctor.observations import (
    CacheServerSeen,
    Deployment,
    Findings,
    GatewaySeen,
    Observations,
    RedisSeen,
    error,
    running,
    unchecked,
    warning,
)

_FULL_SHARE = 0.95

# --- gateway ----------------------------------------------------------------------------------------------


def check_gateway(deployment: Deployment, seen: Observations) -> Findings:
    gateway = seen.gateway
    if gateway is None or not gateway.ready.status:
        url = deployment.gateway_url
        reason = f": {url} {gateway.ready.trouble}" if gateway is not None else ""
        yield unchecked("gateway", "gateway", f"everything that a running gateway shows{reason}")
        return
    if gateway.ready.status not in (200, 503):
        yield error(
            "gateway",
            gateway.name,
            f"/ready answered {gateway.ready.status}",
            "The address is not that of a kvroute gateway.",
            "Give the gateway's address with --url.",
        )
        return
    if gateway.models.status == 401:
        yield unchecked(
            "gateway-key",
            gateway.name,
            "what needs a client's key: give one in KVROUTE_API_KEY",
        )
    if not gateway.admin:
        yield unchecked("admin-key", gateway.name, "what needs the admin key: give it with --admin-key-file")
    needed = deployment.open_files
    if gateway.max_fds is None:
        yield unchecked(
            "descriptors", gateway.name, "its limit of open files: /metrics has no process_max_fds"
        )
    elif gateway.max_fds < needed:
        yield warning(
            "descriptors",
            gateway.name,
            f"may open {gateway.max_fds} files; server.max_in_flight may need {needed}",
            "Above the limit, connections of clients are refused.",
            f"Set LimitNOFILE={max(65536, needed)} (systemd), or `ulimit -n {max(65536, needed)}` before "
            "the start.",
        )


# --- LMCache and L2 ---------------------------------------------------------------------------------------


def check_lmcache(deployment: Deployment, seen: Observations) -> Findings:
    options, gateway = deployment.lmcache, seen.gateway
    if not deployment.reads_caches or not (options.coordinator.enabled or options.controller.enabled):
        return
    if gateway is None or not gateway.admin or not gateway.lmcache_known:
        yield unchecked("lmcache-registered", "LMCache", "needs a running gateway and its admin key")
        return
    for problem in gateway.problems:
        if "chunk hashes" in problem:
            yield error(
                "hashes-differ",
                gateway.name,
                problem,
                "Chunks are matched by their hashes, which depend on PYTHONHASHSEED, the algorithm and the "
                "chunk size.",
                f"Start the engines with PYTHONHASHSEED={options.controller.hash_seed or 'unset'}, "
                f"LMCACHE_CHUNK_SIZE={options.controller.chunk_tokens} and "
                f"LMCACHE_PRE_CACHING_HASH_ALGORITHM={options.controller.hash_algorithm}; or set "
                "lmcache.controller.hash_seed, .chunk_tokens and .hash_algorithm to the engines' values.",
            )
        else:
            yield warning(
                "lmcache-reports",
                gateway.name,
                problem,
                "The map of this instance is incomplete.",
                "Change the setting that the message names.",
            )
    for instance in gateway.uncompared:
        yield unchecked(
            "hashes-differ",
            gateway.name,
            f"chunk hashes of LMCache instance {instance!r}: known after up to "
            f"{options.controller.mismatch_prompts} new prompts through the gateway, longer than "
            f"{options.controller.chunk_tokens} tokens",
        )
    if options.controller.enabled and not options.coordinator.enabled and not gateway.instances:
        yield error(
            "lmcache-registered",
            gateway.name,
            "no LMCache instance has registered with the controller",
            "The gateway does not know what LMCache holds.",
            "Start the engines with LMCACHE_ENABLE_CONTROLLER=True and LMCACHE_CONTROLLER_PULL_URL and "
            "LMCACHE_CONTROLLER_REPLY_URL set to lmcache.controller.pull and .reply.",
        )
    if options.coordinator.enabled:
        yield from _servers(seen, gateway, options.coordinator.listen)


def _servers(seen: Observations, gateway: GatewaySeen, listen: str) -> Findings:
    attached = {worker for server in gateway.servers for worker in server.workers}
    for worker in running(seen):
        if worker.spec.id not in attached:
            names = ", ".join(server.id for server in gateway.servers) or "none"
            yield error(
                "lmcache-registered",
                worker.name,
                f"no LMCache server of this worker reports to the gateway (servers that do: {names})",
                "The gateway does not know what the worker's L1 and L2 hold.",
                f"Start its `lmcache server` with --instance-id {worker.spec.id}, --coordinator-url "
                f"http://GATEWAY:{listen.rpartition(':')[2]} and --coordinator-event-reporting; or map the "
                "ids with lmcache.instances.",
            )
    sizes: dict[int, CacheServerSeen] = {}
    by_id = {str(worker.spec.id): worker for worker in seen.workers}
    for server in gateway.servers:
        yield from _server(server)
        size = server.chunk_tokens
        if size is None:
            continue
        other = next((candidate for chunk_tokens, candidate in sizes.items() if chunk_tokens != size), None)
        sizes.setdefault(size, server)
        block = next((by_id[name].cache.block_size for name in server.workers if name in by_id), None)
        if block and size % block:
            yield error(
                "chunk-size",
                server.name,
                f"its chunks of {size} tokens are no multiple of the engine's blocks of {block}",
                "LMCache stores whole blocks only: chunks are not stored or not found.",
                f"Start `lmcache server` with --chunk-size {max(256 // block, 1) * block}.",
            )
        elif other is not None:
            yield error(
                "chunk-size",
                server.name,
                f"its chunks have {size} tokens, those of {other.name} {other.chunk_tokens}",
                "Servers with different chunk sizes cannot use each other's chunks in L2.",
                f"Start both with the same --chunk-size, for example --chunk-size {other.chunk_tokens}.",
            )


def _server(server: CacheServerSeen) -> Findings:
    if server.doubt == "foreign_hashes":
        yield error(
            "hashes-differ",
            server.name,
            "names its chunks by another hash than BLAKE3",
            "The gateway cannot match any of its chunks.",
            "Start `lmcache server` with --hash-algorithm blake3, its default.",
        )
    elif server.healthy is False or server.trouble:
        what = f"/status {server.trouble}" if server.trouble else "/healthcheck reports a failure"
        yield error(
            "lmcache-degraded",
            server.name,
            what,
            "The engine computes again what LMCache should load, and the gateway cannot read the server's "
            "chunk size.",
            "Restart the LMCache server and look at its log; --http-host and --coordinator-advertise-ip "
            "must give an address that the gateway can reach.",
        )
    elif server.doubt:
        yield warning(
            "lmcache-map",
            server.name,
            f"the gateway's map of it is incomplete ({server.doubt})",
            "Chunks that the map lacks are not counted as cached.",
            "Nothing, if the server was started before the gateway: the map fills with use. Otherwise look "
            "for lost events in the gateway's log.",
        )


def check_store(deployment: Deployment, seen: Observations) -> Findings:
    if not deployment.reads_caches or seen.redis is None:
        return
    store: RedisSeen = seen.redis
    subject = f"L2 ({store.where})"
    if store.trouble:
        yield error(
            "l2-unreachable",
            subject,
            store.trouble,
            "Every request waits lmcache.l2.timeout_ms for an answer that does not come, and L2 hits are "
            "not counted.",
            "Start the Redis, or correct lmcache.l2.redis_url (and redis_password_file); remove the option "
            "if there is no L2.",
        )
        return
    is_strict = store.policy == "noeviction"
    if store.max_bytes and is_strict and store.used_bytes >= _FULL_SHARE * store.max_bytes:
        yield error(
            "l2-full",
            subject,
            f"uses {store.used_bytes:,} of {store.max_bytes:,} bytes, and its maxmemory-policy is noeviction",
            "Redis refuses every write: LMCache stores nothing new in L2.",
            "redis-cli CONFIG SET maxmemory-policy allkeys-lru (and the same in redis.conf), or raise "
            "maxmemory.",
        )
    elif store.max_bytes and is_strict:
        yield warning(
            "l2-policy",
            subject,
            "its maxmemory-policy is noeviction",
            "When maxmemory is reached, Redis refuses writes instead of dropping old chunks.",
            "redis-cli CONFIG SET maxmemory-policy allkeys-lru (and the same in redis.conf).",
        )
    elif not store.max_bytes:
        yield warning(
            "l2-unbounded",
            subject,
            "has no maxmemory",
            "It grows until the machine has no memory left.",
            "redis-cli CONFIG SET maxmemory 32gb and maxmemory-policy allkeys-lru (and the same in "
            "redis.conf).",
        )
