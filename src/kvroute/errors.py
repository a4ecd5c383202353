"""All exception classes of kvroute.

KvrouteError
├── ConfigError              a configuration value is wrong; names its path
│   └── InvalidConfig        all errors of one configuration
├── DiscoveryError           a source of workers cannot be read, or its answer is invalid
│   └── WatchExpired         the version from which a watch continues has expired: list again
├── WireError                a message of vLLM, LMCache or another process violates its protocol
├── UpstreamError            a worker's connection failed (transport level, no HTTP answer)
│   ├── ConnectRefused       nothing was sent: connect failed or was refused
│   ├── NoResources          nothing was sent: the gateway itself lacks descriptors, ports or memory
│   ├── ConnectTimeout       nothing was sent: connect took longer than its deadline
│   ├── PoolExhausted        nothing was sent: all allowed connections stayed busy
│   ├── ConnectionLost       the connection broke after the request was (perhaps) sent
│   ├── ResponseTimeout      no byte arrived within the timeout
│   └── ProtocolViolation    the worker's bytes are not HTTP/1.1
└── GatewayError             the gateway answers the client itself, with `status`, `type`, `code`
    ├── InvalidRequest       400
    │   └── NotIsolated          a request that cannot be put into a key space
    │       ├── AdapterNotIsolated   an adapter's; LMCache could answer it from another model's KV
    │       └── TenantNotIsolated    a tenant's; it could share KV with other tenants
    ├── Unauthorized         401
    ├── Forbidden            403
    ├── ModelNotFound        404
    ├── NotFound             404
    ├── RequestTimeout       408
    ├── BodyTooLarge         413
    ├── PromptTooLong        413  the prompt exceeds the limit of the client's key
    ├── OverLimit            413  the body exceeds a limit of the parser
    ├── UnsupportedMediaType 415
    ├── MisdirectedRequest   421
    ├── TooManyRequests      429
    │   ├── KeyLimitReached      a limit of the client's key
    │   ├── QueueFull            too many requests wait for a worker
    │   └── QueueTimeout         the request has waited too long for a worker
    ├── HeadTooLarge         431
    ├── NotImplementedHere   501
    ├── WorkerUnreachable    502  every routable worker was tried
    ├── NoRoutableWorker     503
    ├── SigningKeysUnknown   503  tokens cannot be checked yet
    ├── ShuttingDown         503
    ├── GatewayOverloaded    503  the gateway lacks descriptors or memory
    ├── WorkerTimeout        504
    └── VersionNotSupported  505

A `GatewayError` has all that the client gets; `request/failures.py` alone writes it. Messages never contain
prompts, keys or credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class KvrouteError(Exception):
    """Root of the tree."""


class ConfigError(KvrouteError):
    """A configuration value is invalid. `path` is its dotted path, such as `fleet.health.interval_s`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class InvalidConfig(ConfigError):
    """All errors of a configuration together; the message has one line per error."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        super().__init__("", "\n".join(map(str, problems)))
        self.problems = tuple(problems)


class DiscoveryError(KvrouteError):
    """A source of workers cannot be read, or its answer is invalid."""


class WatchExpired(DiscoveryError):
    """The version from which a watch continues has expired; the caller must list all objects again."""


class WireError(KvrouteError):
    """A received message cannot be decoded. Never contains the message itself."""


class UpstreamError(KvrouteError):
    """A worker's connection failed before a complete answer.

    `was_sent` is False only if the worker has certainly received no byte of the request. `reused` is True
    when the worker had closed a kept-alive connection before the whole request had arrived there, so that it
    cannot have begun to compute it; that is no sign of bad health.
    """

    was_sent: ClassVar[bool] = True
    cause: ClassVar[str] = "upstream"

    def __init__(self, message: str = "", *, reused: bool = False) -> None:
        super().__init__(message)
        self.reused = reused


class ConnectRefused(UpstreamError):
    was_sent = False
    cause = "refused"


OUT_OF_DESCRIPTORS = "out_of_descriptors"
"""Why the gateway itself refuses: no file descriptor is left."""


class NoResources(UpstreamError):
    was_sent = False
    cause = "no_resources"


class ConnectTimeout(UpstreamError):
    was_sent = False
    cause = "connect_timeout"


class PoolExhausted(UpstreamError):
    was_sent = False
    cause = "pool_exhausted"


class ConnectionLost(UpstreamError):
    cause = "connection_lost"


class ResponseTimeout(UpstreamError):
    cause = "response_timeout"


class ProtocolViolation(UpstreamError):
    cause = "protocol"


class RedirectedByWorker(UpstreamError):
    cause = "redirect"


class GatewayError(KvrouteError):
    """The gateway answers with this error as OpenAI does: `{"error": {message, type, param, code}}`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code
        self.retry_after_s = retry_after_s


class InvalidRequest(GatewayError):
    status, type, code = 400, "invalid_request_error", "invalid_request"


class NotIsolated(InvalidRequest):
    """The gateway cannot put the request into its key space."""


class AdapterNotIsolated(NotIsolated):
    code = "adapter_not_isolated"


class TenantNotIsolated(NotIsolated):
    code = "tenant_not_isolated"


class Unauthorized(GatewayError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(GatewayError):
    status, type, code = 403, "permission_error", "forbidden"


class NotFound(GatewayError):
    status, type, code = 404, "not_found_error", "not_found"


class ModelNotFound(GatewayError):
    status, type, code = 404, "invalid_request_error", "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist on this gateway.", param="model")


class RequestTimeout(GatewayError):
    status, type, code = 408, "invalid_request_error", "request_timeout"


class BodyTooLarge(GatewayError):
    status, type, code = 413, "invalid_request_error", "body_too_large"

    def __init__(self, limit_bytes: int, limit: str = "server.max_body_bytes") -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes ({limit}).")


class PromptTooLong(GatewayError):
    status, type, code = 413, "invalid_request_error", "prompt_too_long"

    def __init__(self, tokens: int, limit: int, name: str) -> None:
        super().__init__(
            f"The prompt has about {tokens} tokens, more than the {limit} of limits.prompt_tokens of the key "
            f"{name!r}."
        )


class UnsupportedMediaType(GatewayError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class MisdirectedRequest(GatewayError):
    status, type, code = 421, "invalid_request_error", "wrong_host"


class OverLimit(GatewayError):
    """A body exceeds a limit of the parser.

    `limit` is the limit's name in metrics and logs: an option of `server`, or `nesting` or `plain_json`,
    which have no option.
    """

    status, type, code = 413, "invalid_request_error", "body_over_limit"

    def __init__(self, limit: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.limit = limit


class TooManyRequests(GatewayError):
    status, type, code = 429, "rate_limit_error", "too_many_requests"


class KeyLimitReached(TooManyRequests):
    code = "key_limit_reached"

    def __init__(self, name: str, limit: str, value: int, retry_after_s: int) -> None:
        super().__init__(
            f"The key {name!r} has reached its limit limits.{limit} of {value}.", retry_after_s=retry_after_s
        )


class TooManyGuesses(TooManyRequests):
    """Too many wrong admin keys were sent."""

    code = "too_many_key_guesses"


class QueueFull(TooManyRequests):
    code = "queue_full"


class QueueTimeout(TooManyRequests):
    code = "queue_timeout"


class HeadTooLarge(GatewayError):
    status, type, code = 431, "invalid_request_error", "head_too_large"


class NotImplementedHere(GatewayError):
    status, type, code = 501, "invalid_request_error", "not_implemented"


class WorkerUnreachable(GatewayError):
    status, type, code = 502, "bad_gateway", "worker_unreachable"


class RequestLostWorkers(GatewayError):
    """Workers were lost while they computed a request with this body, so no other worker gets it."""

    status, type, code = 502, "bad_gateway", "request_lost_workers"


class NoRoutableWorker(GatewayError):
    status, type, code = 503, "service_unavailable", "no_routable_worker"


class WorkersBusy(GatewayError):
    """Every worker that was asked is full."""

    status, type, code = 503, "service_unavailable", "workers_busy"


class SigningKeysUnknown(GatewayError):
    status, type, code = 503, "service_unavailable", "signing_keys_unknown"


class ShuttingDown(GatewayError):
    status, type, code = 503, "service_unavailable", "shutting_down"


class GatewayOverloaded(GatewayError):
    """The gateway lacks a resource of its own. `code` says which: `out_of_descriptors` or `low_memory`."""

    status, type = 503, "service_unavailable"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code, retry_after_s=1)


class WorkerTimeout(GatewayError):
    status, type, code = 504, "gateway_timeout", "worker_timeout"


class VersionNotSupported(GatewayError):
    status, type, code = 505, "invalid_request_error", "http_version_not_supported"
