"""Options of the HTTP server and of the admin API."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import SecretStr, field_validator

from kvroute.access.admin_key import MIN_KEY_CHARS, key_lines
from kvroute.access.jwt import JwtOptions
from kvroute.access.key_file import ClientKeysOptions
from kvroute.fleet.worker import SALTED_SINCE, release_shown
from kvroute.http.authority import host_name
from kvroute.openai.bounded import BodyLimits
from kvroute.options import Options, Switch, option
from kvroute.tls import ServerTlsOptions

MIB = 1024 * 1024
LIMITS = BodyLimits()

AFTER_CUT_S = 5.0
"""Time to write error events and close connections after running answers were cut."""
_PARENT_S = 5.0
"""Additional time that the parent of several processes waits before it kills them."""


class ServerOptions(Options):
    """The listening socket, limits on what clients may send, and shutdown."""

    host: str = option(
        "127.0.0.1",
        "Address to listen on; `0.0.0.0` is every IPv4 address, `::` every address of both families.",
    )
    port: int = option(8080, "TCP port to listen on; 0 lets the system choose.", ge=0, le=65535)
    root_path: str = option(
        "",
        "Path below which a proxy publishes the gateway, such as `/vllm`. The gateway then answers with this "
        "prefix as well as without it; workers get paths without it.",
    )
    processes: int = option(
        1,
        "Processes that serve the address together, each on a core of its own (Linux only).",
        unit="processes",
        higher="more requests per second; each further process takes 50 MiB and accounts for every request",
        lower="with 1 there is nothing to share, and no cost of sharing",
        ge=1,
        le=64,
    )
    tls: ServerTlsOptions = option(default_factory=ServerTlsOptions)
    backlog: int = option(
        2048,
        "Connections the kernel holds until they are accepted.",
        unit="connections",
        higher="bursts of new connections wait",
        lower="bursts of new connections are refused sooner",
        ge=1,
    )
    keep_alive_s: float = option(
        75.0,
        "How long an idle client connection is kept open, before its first request and between requests.",
        unit="s",
        higher="fewer reconnects; keep it above the idle timeout of a load balancer in front",
        lower="fewer idle sockets",
        gt=0,
    )
    max_head_bytes: int = option(
        65_536,
        "Largest head of a request: request line and header lines. Trailers have the same limit. As soon as "
        "a head is larger, it is answered 431 and the connection is closed.",
        unit="bytes",
        higher="more headers pass",
        lower="less memory one connection can take",
        ge=256,
    )
    max_head_line_bytes: int = option(
        16_384,
        "Longest line of a request's head, including the request line; a longer one is answered 431.",
        unit="bytes",
        higher="longer cookies, tokens and query strings pass",
        lower="less memory one connection can take",
        ge=64,
    )
    max_header_lines: int = option(
        128,
        "Most header lines of a request; more are answered 431.",
        unit="lines",
        higher="clients behind many proxies pass",
        lower="less work one request can cause",
        ge=4,
    )
    head_timeout_s: float = option(
        10.0,
        "How long the head of a request may take from its first byte. After that the request is answered 408 "
        "and the connection is closed. 0: no limit.",
        unit="s",
        higher="clients on very slow networks are served",
        lower="half requests hold connections for a shorter time",
        ge=0,
    )
    body_timeout_s: float = option(
        30.0,
        "Time over which the rate of an arriving request body is averaged. A body slower than "
        "`body_bytes_per_s` is answered 408 and the connection is closed. Time during which the gateway "
        "itself does not read is not counted. 0: no limit.",
        unit="s",
        higher="uploads may pause for longer",
        lower="half requests hold connections and memory for a shorter time",
        ge=0,
    )
    body_bytes_per_s: int = option(
        1000,
        "Lowest allowed rate of an arriving request body.",
        unit="bytes/s",
        higher="slow uploads are refused earlier",
        lower="uploads over slower networks pass",
        ge=1,
    )
    client_write_timeout_s: float = option(
        60.0,
        "How long a client may accept no byte of an answer that waits for it. After that its connection is "
        "closed, so that it does not hold its worker. 0: no limit.",
        unit="s",
        higher="clients may pause for longer",
        lower="clients that do not read hold a worker's slot for a shorter time",
        ge=0,
    )
    max_body_bytes: int = option(
        64 * MIB,
        "Largest request body; a larger one is answered 413.",
        unit="bytes",
        higher="larger images and audio pass",
        lower="less memory one client can take",
        ge=1,
        reload=True,
    )
    max_messages: int = option(
        LIMITS.max_messages,
        "Most messages of a chat, or items of a `/v1/responses` input. This option and the next five limit "
        "how much of a body is read. Of a body above a limit the gateway reads at most the model's name, and "
        "forwards it by load, unless something else depends on its content (an alias, isolation, roles, a "
        "key's limit of prompt tokens, `/v1/responses`): then it is answered 413.",
        unit="messages",
        higher="longer chats are routed by their content",
        lower="less time that one request can take from others: about 1 us a message",
        ge=1,
        le=1_000_000,
    )
    max_prompts: int = option(
        LIMITS.max_prompts,
        "Most prompts of a completion, or inputs of an embedding.",
        unit="prompts",
        higher="larger batches are routed by their content",
        lower="less time that one request can take from others: about 5 us a prompt",
        ge=1,
        le=16_384,
    )
    max_content_parts: int = option(
        LIMITS.max_content_parts,
        "Most parts (texts, images) in the messages of a chat.",
        unit="parts",
        higher="chats of more parts are routed by their content",
        lower="less time that one request can take from others: about 0.5 us a part",
        ge=1,
        le=1_000_000,
    )
    max_token_ids: int = option(
        LIMITS.max_token_ids,
        "Most token ids in the prompts of a completion.",
        unit="tokens",
        higher="longer prompts of ids are routed by their content",
        lower="less time that one request can take: about 30 ms for a million",
        ge=1,
    )
    max_json_values: int = option(
        LIMITS.max_json_values,
        "Most JSON values of a body above 2 MiB, in all of its fields.",
        unit="values",
        higher="bodies of more structure are routed by their content",
        lower="less time that one request can take from others: about 10 ms for a million",
        ge=1,
        le=8_388_608,
    )
    max_json_members: int = option(
        LIMITS.max_json_members,
        "Most members of all objects of a body above 2 MiB, of equal names too. A body with more is not "
        "read, not even for its model.",
        unit="members",
        higher="bodies of more members are routed by their content",
        lower="less time that one request can take from others: up to 100 ms for a million",
        ge=1,
        le=1_048_576,
    )
    max_form_parts: int = option(
        LIMITS.max_form_parts,
        "Most parts of a multipart form (vLLM takes 1000 files and 1000 fields).",
        unit="parts",
        higher="larger forms are read",
        lower="less time that one request can take from others: about 5 us a part",
        ge=1,
        le=10_000,
    )
    max_in_flight: int = option(
        0,
        "Concurrent inference requests of each process; further ones are answered 429 with Retry-After. "
        "0: no limit.",
        unit="requests",
        higher="longer queues in the workers",
        lower="clients get 429 earlier",
        ge=0,
        reload=True,
    )
    config_poll_s: float = option(
        0.0,
        "How often the configuration file is polled; a changed file is loaded as after SIGHUP. 0: only after "
        "SIGHUP.",
        unit="s",
        higher="fewer file system calls",
        lower="changes apply sooner",
        ge=0,
    )
    memory_watermark: float = option(
        0.0,
        "Share of the memory limit from which new requests are answered 503 with Retry-After; running ones "
        "finish. They are served again below 95 % of it. 0: off.",
        higher="more requests are served before the gateway sheds load",
        lower="more room for the running requests before the kernel kills the gateway",
        ge=0,
        le=1,
    )
    memory_limit_bytes: int = option(
        0,
        "Memory limit of each process for `memory_watermark`, compared with its resident memory. 0: the "
        "limit of the cgroup (container), compared with the memory of all its processes without file caches; "
        "without such a limit, the machine's memory.",
        unit="bytes",
        higher="requests are shed later",
        lower="requests are shed sooner",
        ge=0,
    )
    memory_interval_s: float = option(
        1.0,
        "How often the memory is read.",
        unit="s",
        higher="fewer reads",
        lower="faster growth is noticed in time",
        gt=0,
    )
    api_keys: tuple[SecretStr, ...] = option(
        (), "API keys. Clients must send one as `Authorization: Bearer KEY`. Empty: no key is needed."
    )
    api_keys_file: Path | None = option(
        None, "File with API keys, one per line; blank lines and lines that start with `#` are ignored."
    )
    client_keys: ClientKeysOptions = option(default_factory=ClientKeysOptions)
    jwt: JwtOptions = option(default_factory=JwtOptions)
    isolation: Literal["none", "per-key"] = option(
        "none",
        "Which clients share KV. `none`: all. `per-key`: each name of `client_keys` (or each `tenant` that "
        "several names have) is a tenant, and tenants share no KV, no sessions and no stored responses: "
        "docs/tenants.md. Keys of `api_keys` are one tenant together. Needs `client_keys`.",
    )
    isolation_checks_release: Annotated[bool, Switch] = option(
        True,
        "With `isolation`, send no requests to a worker whose `/version` is older than "
        f"{release_shown(SALTED_SINCE)} or unknown: its vLLM may ignore `cache_salt`.",
        higher="on: tenants share no KV, also when a worker is replaced by an older one",
        lower="off: for builds of vLLM whose version is no release number; isolation rests on the operator",
    )
    trusted_proxies: tuple[str, ...] = option(
        ("127.0.0.1",),
        "Addresses or networks of proxies whose `X-Forwarded-For` names the client in the audit lines of the "
        "admin API; `*` trusts every address. The header never gives access.",
    )
    state_dir: Path | None = option(
        None,
        "Folder for the admin key that the gateway creates if none is set, one file for each port. Unset: "
        "`$XDG_STATE_HOME/kvroute`, by default `~/.local/state/kvroute`.",
    )
    trust_clients: Annotated[bool, Switch] = option(
        False,
        "Let clients tell engines where to read KV and where to compute: `kv_transfer_params`, "
        "`ec_transfer_params` and `vllm_xargs` are passed on, in a fleet without roles, and "
        "`X-data-parallel-rank` also of clients with named keys.",
        higher="on: for benchmarks and routers in front of this one",
        lower="off: no client makes an engine connect to a host, or reads KV of others by block numbers",
    )
    allow_strategy_header: Annotated[bool, Switch] = option(
        False,
        "Let a request choose its strategy with the header `x-kvroute-strategy`.",
        higher="experiments per request; any client can undo the routing",
    )
    fast_lane: Annotated[bool, Switch] = option(
        True,
        "Relay plain requests inside the HTTP server's own protocol instead of through ASGI. What clients "
        "and workers see is the same.",
        higher="on: half the CPU time per request",
        lower="off: all requests take the ASGI path, which helps to find the cause of a problem",
    )
    decisions_kept: int = option(
        1000,
        "Routing decisions kept for `GET /admin/decisions`.",
        unit="decisions",
        higher="a longer history",
        lower="less memory",
        ge=0,
    )
    shutdown_delay_s: float = option(
        0.0,
        "How long after SIGTERM the gateway still serves and accepts connections, while `/ready` answers "
        "503 and each answer has `Connection: close`. After that it accepts no more connections.",
        unit="s",
        higher="load balancers and Kubernetes have more time to stop sending traffic",
        lower="a faster restart; 0 suits a gateway with nothing in front of it",
        ge=0,
    )
    drain_timeout_s: float = option(
        30.0,
        "How long after SIGTERM and `shutdown_delay_s` running answers may take to finish before they are "
        "cut.",
        unit="s",
        higher="fewer answers are cut",
        lower="a faster restart; keep it below the supervisor's own kill timeout",
        ge=0,
    )

    @property
    def longest_shutdown_s(self) -> float:
        """Longest time from SIGTERM to the exit of the last process. A supervisor must allow it."""
        parent_s = _PARENT_S if self.processes > 1 else 0.0
        return self.shutdown_delay_s + self.drain_timeout_s + AFTER_CUT_S + parent_s

    @field_validator("api_keys")
    @classmethod
    def _are_not_empty(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(key.get_secret_value().strip() for key in value):
            raise ValueError("a key is empty: requests without any key would have it")
        return value

    @property
    def body_limits(self) -> BodyLimits:
        return BodyLimits(*(getattr(self, name) for name in BodyLimits._fields))

    @field_validator("root_path")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if value and (not value.startswith("/") or value.endswith("/")):
            raise ValueError("must be empty, or begin with a slash and end without one, such as /vllm")
        return value

    @field_validator("processes")
    @classmethod
    def _only_on_linux(cls, value: int) -> int:
        if value > 1 and not sys.platform.startswith("linux"):
            raise ValueError("more than 1 needs Linux")
        return value


class AdminOptions(Options):
    """The admin API, `/admin/*`, and who may use it."""

    api_key: SecretStr | None = option(
        None,
        f"Key for `/admin/*`, sent as `Authorization: Bearer KEY`, of {MIN_KEY_CHARS} or more characters. "
        "Several keys, one per line, are all valid, so that one can replace another. Unset: the gateway "
        "creates a key and logs the name of its file.",
    )
    api_key_file: Path | None = option(
        None,
        "File with admin keys, one per line; blank lines and lines that start with `#` are ignored.",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names and addresses, without ports, that are allowed in the headers Host and Origin under `/admin` "
        "and `/ui`, such as the name of a proxy. `localhost`, loopback addresses and the address that the "
        "client has connected to are always allowed. Another Host is answered 421, another Origin 403.",
    )

    engine_timeout_s: float = option(
        120.0,
        "Longest time for a worker's answer to a request that the admin API passes on, such as `/sleep`.",
        unit="s",
        higher="large models have time to sleep and to wake up",
        lower="a hung worker is reported sooner",
        gt=0,
    )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are set."""
        return key_lines(self.api_key.get_secret_value()) if self.api_key is not None else ()

    @field_validator("api_key")
    @classmethod
    def _holds_a_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not key_lines(value.get_secret_value()):
            raise ValueError("holds no key")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if host_name(each) is None:
                raise ValueError(f"{each!r} is not a name or an address without scheme and port")
        return value
