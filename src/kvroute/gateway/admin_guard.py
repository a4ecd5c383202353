"""Checks requests under `/admin` and `/ui`: a Host and an Origin of this gateway, and the admin key.

The key stops strangers. Host and Origin stop web pages that use an operator's browser: by a DNS name that
they point to this address (DNS rebinding), or by cross-origin requests. Also the file of the generated admin
key.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from kvroute.errors import (
    ConfigError,
    Forbidden,
    GatewayError,
    MisdirectedRequest,
    Unauthorized,
    UnsupportedMediaType,
)
from kvroute.gateway.access import AdminKeys, bearer
from kvroute.gateway.asgi import Scope
from kvroute.gateway.headers import Headers, header
from kvroute.gateway.key_guesses import KeyGuesses
from kvroute.metrics import Metrics

_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")


def authority(text: str) -> tuple[str, int | None] | None:
    """Host and port of `host[:port]`, the host in lower case without a final dot; None if malformed."""
    match = _AUTHORITY.fullmatch(text.strip().lower())
    if match is None:
        return None
    name = match[1].removesuffix(".")
    if name.startswith("["):
        try:
            name = str(ip_address(name[1:-1]))
        except ValueError:
            return None
    return (name, int(match[2]) if match[2] else None) if name else None


def host_name(text: str) -> str | None:
    """A name or an address without a port, as `authority` returns it; None if it is neither."""
    found = authority(f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text)
    return found[0] if found is not None and found[1] is None else None


def is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


ADMIN: Final = "/admin"
PAGE: Final = "/ui"
"""A page that shows what `/admin` answers: public, for browsers only."""

KEY_FINGERPRINT: Final = "kvroute.admin_key"
"""Key in the scope of a request under `/admin`: the fingerprint of its admin key."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_OWN_SITE: Final = ("same-origin", "none")


class AdminGuard:
    """Checks requests before the application sees them.

    A Host is right if it is a loopback name, the address that the client has connected to, `listens_on`, or
    one of `allowed`. An Origin is right if it is the Host, with its port, or one of `allowed`.
    """

    def __init__(
        self,
        keys: AdminKeys,
        listens_on: str,
        allowed: Collection[str],
        metrics: Metrics,
        guesses: KeyGuesses,
    ) -> None:
        self._keys = keys
        self._guesses = guesses
        self._allowed = frozenset(filter(None, map(host_name, allowed)))
        # `0.0.0.0` and `::` are no addresses that a client connects to.
        self._listens_on = host_name(listens_on) if listens_on not in ("0.0.0.0", "::") else None
        self._metrics = metrics

    def check(self, scope: Scope) -> None:
        """Raises MisdirectedRequest (421), Forbidden (403), TooManyGuesses (429), Unauthorized (401) or
        UnsupportedMediaType (415), in this order; a refusal is counted. Paths outside of `/admin` and `/ui`
        pass."""
        path: str = scope["path"]
        if not (is_below(path, ADMIN) or is_below(path, PAGE)):
            return
        try:
            self._check(scope, path)
        except GatewayError as error:
            self._metrics.rejected.labels(error.error_code or error.type).inc()
            raise

    def _check(self, scope: Scope, path: str) -> None:
        headers: Headers = scope["headers"]
        host = self._own_host(headers, scope.get("server"))
        for value in _all(headers, b"origin"):
            if not self._is_own_origin(value, host):
                raise Forbidden(
                    "Requests from pages of other origins are refused (admin.allowed_hosts).",
                    code="wrong_origin",
                )
        site = header(headers, b"sec-fetch-site").decode("latin-1")
        if site and site not in _OWN_SITE and not _opens_page(scope, path):
            raise Forbidden("Requests from pages of other sites are refused.", code="wrong_origin")
        if is_below(path, ADMIN):
            scope[KEY_FINGERPRINT] = self._owner(headers, scope.get("client"))
            # A page of another origin cannot send this type without a CORS preflight.
            if _has_body(headers) and _media_type(headers) != "application/json":
                raise UnsupportedMediaType("The body must be JSON: Content-Type: application/json.")

    def _owner(self, headers: Headers, client: tuple[str, int] | None) -> str:
        """The fingerprint of the request's admin key."""
        given = bearer(headers)
        if not given:
            return self._keys.owner(headers)  # raises, and nothing was guessed
        address = "" if client is None else client[0]
        self._guesses.check(address, given)
        try:
            found = self._keys.owner(headers)
        except Unauthorized:
            self._guesses.wrong(address, given)
            raise
        self._guesses.right(address)
        return found

    def _own_host(self, headers: Headers, listening: tuple[str, int | None] | None) -> tuple[str, int | None]:
        """Name and port of the Host header."""
        values = _all(headers, b"host")
        found = authority(values[0]) if len(values) == 1 else None
        if found is None or not (
            is_loopback(found[0])
            or found[0] in self._allowed
            or found[0] == self._listens_on
            or (listening is not None and found[0] == host_name(listening[0]))
        ):
            raise MisdirectedRequest(
                "The admin API is not served under this Host; admin.allowed_hosts can name it."
            )
        return found

    def _is_own_origin(self, origin: str, host: tuple[str, int | None]) -> bool:
        scheme, separator, rest = origin.partition("://")
        default = _DEFAULT_PORTS.get(scheme)
        found = authority(rest)
        if not separator or default is None or found is None:  # among these: `null`
            return False
        name, port = found
        return name in self._allowed or (name, port or default) == (host[0], host[1] or default)


def is_below(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or lies below it."""
    return path == prefix or path.startswith(prefix + "/")


def _opens_page(scope: Scope, path: str) -> bool:
    """Whether a browser opens the page itself, which shows nothing without the key."""
    is_navigation = header(scope["headers"], b"sec-fetch-mode") == b"navigate"
    return is_below(path, PAGE) and is_navigation and scope["method"] == "GET"


def _all(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _has_body(headers: Headers) -> bool:
    length = header(headers, b"content-length").strip(b" 0")
    return bool(length or header(headers, b"transfer-encoding"))


def _media_type(headers: Headers) -> str:
    return header(headers, b"content-type").decode("latin-1").partition(";")[0].strip().lower()


MIN_KEY_CHARS: Final = 16
"""Shortest admin key. With `KeyGuesses` even the keys of 8 random letters could not be guessed in years; the
rest is for keys that are not random."""

OPTION: Final = "admin.api_key_file"
"""The option that error messages name: it helps if the key file cannot be kept."""

_MAX_FILE_BYTES: Final = 64 * 1024


def key_lines(text: str) -> tuple[str, ...]:
    """The keys in `text`, one a line; blank lines and lines that begin with `#` do not count."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def check_keys(keys: Collection[str]) -> None:
    """Raise ValueError if a key is so short that it may be guessed."""
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_CHARS:
            which = "the key" if len(keys) == 1 else f"key {number} of {len(keys)}"
            raise ValueError(
                f"{which} has {len(key)} characters; an admin key needs {MIN_KEY_CHARS} or more, and should "
                "be random: `openssl rand -base64 32`"
            )


def user_state_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/kvroute`, by default `~/.local/state/kvroute`. Raises ConfigError without a home."""
    base = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is invalid and does not count
        return Path(base) / "kvroute"
    try:
        return Path.home() / ".local" / "state" / "kvroute"
    except RuntimeError:
        raise ConfigError(
            OPTION, "is not set, and this user has no home folder to keep a key in; set it, or --state-dir"
        ) from None


def key_path(folder: Path, port: int) -> Path:
    """The file of the admin key of the gateway that listens on `port`."""
    return folder / f"admin-key-{port}"


def read_or_create_key(path: Path) -> str:
    """Return the content of the key file; if the file does not exist, create it with a random key (mode
    0600).

    Processes that start at the same time get the same key. Raises ConfigError if the file cannot be created,
    or if another user may have read or written it. Blocks.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own_folder(path.parent)
        try:
            return _read(path)
        except FileNotFoundError:
            _create(path, secrets.token_urlsafe(32) + "\n")
            return _read(path)
    except OSError as exc:
        raise ConfigError(
            OPTION,
            f"is not set, and the gateway cannot keep a key of its own in {path}: {exc.strerror}; "
            "set it, or --state-dir to a folder that can be written",
        ) from exc


def _create(path: Path, text: str) -> None:
    """Create a complete file at `path`, unless another process has created it. Raises OSError."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # independent of the umask
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        # Not a rename: of two gateways that start together, the second must not replace the first one's key.
        os.link(new, path)
    except FileExistsError:
        pass  # another process was first; its key counts
    finally:
        new.unlink()


def _read(path: Path) -> str:
    """Read the file. Raises OSError, or ConfigError if other users have access to it."""
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise ConfigError(
                OPTION, f"{path} is a symbolic link; remove it, or name the file here"
            ) from None
        raise
    try:
        _require_own_file(path, os.fstat(descriptor))
        text = os.read(descriptor, _MAX_FILE_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    if not key_lines(text):
        raise ConfigError(OPTION, f"{path} holds no key; remove it, and the gateway makes one")
    try:
        check_keys(key_lines(text))
    except ValueError as exc:
        raise ConfigError(OPTION, f"{path}: {exc}") from None
    return text


def _require_own_file(path: Path, facts: os.stat_result) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(OPTION, f"{path} is not a regular file; remove it")
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            OPTION, f"{path} belongs to user {facts.st_uid}, the gateway runs as {os.geteuid()}; remove it"
        )
    if mode & 0o077:
        raise ConfigError(
            OPTION,
            f"{path} has mode {mode:04o}: others may know the key, or have written it. "
            "Remove the file, and the gateway makes a new key",
        )


def _require_own_folder(folder: Path) -> None:
    """Raise ConfigError if every user could replace a file in `folder`. Raises OSError."""
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            OPTION, f"is not set, and every user may replace a key in {folder} (mode {mode & 0o7777:04o})"
        )
