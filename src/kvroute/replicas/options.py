"""Options of the sharing between gateways."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationInfo, field_validator, model_validator

from kvroute.options import Options, option
from kvroute.tls import ClientTlsOptions

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}").fullmatch
_MIN_KEY_CHARS: Final = 16


class SharingOptions(Options):
    """Sharing with other gateways through Redis or Valkey (docs/scaling.md). Off unless `url` is set.

    All gateways with one `url` and one `fleet` route as one: each knows the requests, loads and route history
    of the others. No request waits for Redis, and a gateway that cannot reach it routes alone.
    """

    url: SecretStr | None = option(
        None,
        "Redis or Valkey that the gateways share: `redis://[user:password@]host[:port][/number]`, or "
        "`rediss://` for TLS. Use one of its own, or an ACL user: everybody who can write to it can disturb "
        "the sharing.",
    )
    url_file: Path | None = option(None, "File with the URL.")
    password: SecretStr | None = option(None, "Password of the Redis, if the URL has none.")
    password_file: Path | None = option(None, "File with the password.")
    tls: ClientTlsOptions = option(default_factory=ClientTlsOptions)
    key: SecretStr | None = option(
        None,
        "Secret that all members have, at least 16 characters. Changes of the fleet (drained, added and "
        "removed workers), the use of keys' limits, and LMCache's reports carry an HMAC with it. Without a "
        "key they are neither sent nor believed; everything else is shared.",
    )
    key_file: Path | None = option(None, "File with the secret.")
    fleet: str = option(
        "kvroute",
        "Name of the fleet. Gateways of several fleets can use one Redis: its channels have this name.",
    )
    member: str = option(
        "",
        "Name of this gateway in logs and `/admin/members`. Empty: the host's name, in Kubernetes the pod's.",
    )
    max_queued_bytes: int = option(
        8 * 1024 * 1024,
        "Most bytes of messages that wait for Redis, together with sent ones that are kept for members that "
        "missed them. Then the oldest are dropped.",
        unit="bytes",
        ge=64 * 1024,
        le=1024 * 1024 * 1024,
        higher="after a longer outage the others still get everything",
        lower="less memory",
    )
    join_timeout_s: float = option(
        5.0,
        "How long a starting gateway waits for the state of the others, at least 5 s. Then it serves without "
        "it, with a log line.",
        unit="s",
        ge=0,
        le=60,
        higher="a slow snapshot is complete",
        lower="ready sooner if another member does not answer",
    )

    @field_validator("url")
    @classmethod
    def _redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        try:
            parts = urlsplit(value.get_secret_value())
            is_supported = (
                parts.scheme in ("redis", "rediss") and bool(parts.hostname) and (parts.port or 1) > 0
            )
            is_supported = (
                is_supported and not parts.query and (parts.path in ("", "/") or parts.path[1:].isdecimal())
            )
        except ValueError:
            is_supported = False
            parts = None
        if parts is not None and "sentinel" in parts.scheme:
            raise ValueError("Sentinel is not supported: name an address that always leads to the primary")
        if not is_supported:
            raise ValueError("must be redis://[user:password@]host[:port][/number], or rediss://")
        return value

    @field_validator("fleet", "member")
    @classmethod
    def _name(cls, value: str, info: ValidationInfo) -> str:
        if not _NAME(value) and (value or info.field_name == "fleet"):
            raise ValueError("must have 1 to 63 letters, digits, dots, dashes and underscores")
        return value

    @field_validator("key")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        if len(value.get_secret_value()) < _MIN_KEY_CHARS:
            raise ValueError(f"must have at least {_MIN_KEY_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _are_used(self) -> SharingOptions:
        if self.url is None and (self.key is not None or self.password is not None or self.tls.is_set):
            raise ValueError("url: is not set, so key, password and tls have no effect")
        if self.tls.is_set and not self.uses_tls:
            raise ValueError("tls: has no effect unless url starts with rediss://")
        return self

    @property
    def is_on(self) -> bool:
        """Whether this gateway shares with others."""
        return self.url is not None

    @property
    def name(self) -> str:
        """The name of this gateway."""
        return self.member or socket.gethostname()

    @property
    def uses_tls(self) -> bool:
        """Whether the Redis is reached over TLS."""
        return self.url is not None and urlsplit(self.url.get_secret_value()).scheme == "rediss"

    @property
    def mac_key(self) -> bytes | None:
        """The key of the HMACs."""
        return None if self.key is None else self.key.get_secret_value().encode()
