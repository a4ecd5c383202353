"""TLS: options for certificate files, and the SSL contexts that are made from the files."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import model_validator

from kvroute.errors import ConfigError
from kvroute.options import Options, option
from kvroute.secret_files import writers_problem

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"
_ALPN = ["http/1.1"]
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL).findall
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
"""Tags of ASN.1."""


class TlsFileError(ConfigError):
    """A certificate or key file cannot be used. `path` is the option, the text names the file."""


class ClientTlsOptions(Options):
    """How the gateway connects to TLS servers. Read at the start; a changed file needs a restart."""

    ca_file: Path | None = option(
        None,
        "PEM file with the certificates of the authorities to trust, instead of the default list.",
    )
    cert_file: Path | None = option(
        None, "PEM file with the client certificate to present (mTLS), and its chain. Needs `key_file`."
    )
    key_file: Path | None = option(None, "PEM file with the private key of `cert_file`, not encrypted.")

    @model_validator(mode="after")
    def _needs_both_files(self) -> ClientTlsOptions:
        _check_pair(self.cert_file, self.key_file)
        return self

    @property
    def is_set(self) -> bool:
        """Whether any file is set."""
        return self.ca_file is not None or self.cert_file is not None


class ServerTlsOptions(Options):
    """TLS 1.2 and 1.3 for clients; off unless `cert_file` is set."""

    cert_file: Path | None = option(
        None,
        "PEM file with the server's certificate, followed by its chain. Needs `key_file`. With it the port "
        "accepts TLS only.",
    )
    key_file: Path | None = option(None, "PEM file with the private key of `cert_file`, not encrypted.")
    client_ca_file: Path | None = option(
        None,
        "PEM file with the authorities whose client certificates are accepted. With it every client must "
        "present a certificate (mTLS), probes and Prometheus too.",
    )
    handshake_timeout_s: float = option(
        10.0,
        "How long the handshake of a new connection may take; after that the connection is closed.",
        unit="s",
        higher="clients on very slow networks are served",
        lower="connections that never finish the handshake are held for a shorter time",
        gt=0,
    )
    reload_interval_s: float = option(
        5.0,
        "Time between checks whether the files have changed. New connections get the new certificate; open "
        "ones continue. Files that cannot be used are refused, and the old ones stay in use. 0: no checks.",
        unit="s",
        higher="fewer checks",
        lower="a new certificate is used sooner",
        ge=0,
    )

    @model_validator(mode="after")
    def _needs_both_files(self) -> ServerTlsOptions:
        _check_pair(self.cert_file, self.key_file)
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file: needs cert_file and key_file")
        return self

    @property
    def is_on(self) -> bool:
        return self.cert_file is not None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are set."""
        candidates = (self.cert_file, self.key_file, self.client_ca_file)
        return tuple(file for file in candidates if file is not None)


def _check_pair(cert_file: Path | None, key_file: Path | None) -> None:
    if (cert_file is None) != (key_file is None):
        missing = "key_file" if key_file is None else "cert_file"
        raise ValueError(f"{missing}: cert_file and key_file must be set together")


def server_context(options: ServerTlsOptions, section: str) -> ssl.SSLContext:
    """The context of a server. Raises TlsFileError with the option's path below `section`.

    Blocks: it reads the files. `options.is_on` must be true.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client of TLS 1.2 could make the server compute handshakes again and again on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(_ALPN)
    assert options.cert_file is not None
    assert options.key_file is not None
    _load_pair(context, options.cert_file, options.key_file, section)
    if options.client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authorities(context, options.client_ca_file, f"{section}.client_ca_file")
    return context


def expiry(cert_file: Path, path: str) -> float:
    """The earliest expiry of the certificates in a PEM file, in seconds since the epoch.

    The whole chain counts: clients refuse a chain with an expired certificate. Raises TlsFileError with the
    option's `path`. Blocks.
    """
    try:
        expiries = [
            _not_after(ssl.PEM_cert_to_DER_cert(text)) for text in _PEM(cert_file.read_text("latin-1"))
        ]
    except OSError as error:
        raise TlsFileError(path, f"cannot read {cert_file}: {error.strerror}") from None
    except (ValueError, IndexError):
        raise TlsFileError(path, f"{cert_file} has a certificate that cannot be decoded") from None
    if not expiries:
        raise TlsFileError(path, f"{cert_file} has no PEM certificate")
    return min(expiries)


def _not_after(der: bytes) -> float:
    """The end of a certificate's validity (RFC 5280, 4.1). Raises ValueError and IndexError."""
    # An SSL context does not tell it, and gateways with a certificate do not need the package cryptography.
    fields = _children(_children(der)[0][1])  # of the part that is signed
    if fields[0][0] == _VERSION:
        fields = fields[1:]
    _, (kind, text) = _children(fields[3][1])  # after serial number, algorithm and issuer
    form = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _children(der: bytes) -> list[tuple[int, bytes]]:
    """The elements of an ASN.1 sequence: the tag, and the content; for a sequence, with its own head."""
    content, elements = _element(der, 0)[1], list[tuple[int, bytes]]()
    at = 0
    while at < len(content):
        tag, inner, end = _element(content, at)
        elements.append((tag, content[at:end] if tag == _SEQUENCE else inner))
        at = end
    return elements


def _element(der: bytes, at: int) -> tuple[int, bytes, int]:
    """Tag, content and end of the element that begins at `at`."""
    tag, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:  # the number of bytes that hold the size
        start += size & 0x7F
        size = int.from_bytes(der[at + 2 : start], "big")
    if start + size > len(der):
        raise ValueError("the element is cut off")
    return tag, der[start : start + size], start + size


def client_context(
    options: ClientTlsOptions, section: str, default: Callable[[], ssl.SSLContext]
) -> ssl.SSLContext:
    """The context of a client. Raises TlsFileError with the option's path below `section`.

    `default` makes the context that is used without a `ca_file`. Blocks: it reads the files.
    """
    if options.ca_file is None:
        context = default()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, options.ca_file, f"{section}.ca_file")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if options.cert_file is not None and options.key_file is not None:
        _load_pair(context, options.cert_file, options.key_file, section)
    return context


def _load_pair(context: ssl.SSLContext, cert_file: Path, key_file: Path, section: str) -> None:
    _require(cert_file, _CERTIFICATE, "certificate", f"{section}.cert_file")
    _require(key_file, _KEY, "private key", f"{section}.key_file")
    try:
        # Without a password function OpenSSL asks on the terminal.
        context.load_cert_chain(cert_file, key_file, password=_refuse_password)
    except _EncryptedKey:
        raise TlsFileError(f"{section}.key_file", f"{key_file}: the key is encrypted") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"{key_file} is not the key of the certificate in {cert_file}"
            raise TlsFileError(f"{section}.key_file", text) from None
        text = f"{cert_file} with {key_file}: {_reason(error)}"
        raise TlsFileError(f"{section}.cert_file", text) from None
    except OSError as error:  # the file was removed or replaced after the check above
        text = f"cannot read {cert_file} or {key_file}: {error.strerror}"
        raise TlsFileError(f"{section}.cert_file", text) from None


def _load_authorities(context: ssl.SSLContext, file: Path, path: str) -> None:
    _require(file, _CERTIFICATE, "certificate", path)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise TlsFileError(path, f"{file}: {_reason(error)}") from None
    except OSError as error:
        raise TlsFileError(path, f"cannot read {file}: {error.strerror}") from None


def _require(file: Path, mark: bytes, kind: str, path: str) -> None:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise TlsFileError(path, f"cannot read {file}: {error.strerror}") from None
    if mark not in text:
        raise TlsFileError(path, f"{file} has no PEM {kind}")
    if problem := writers_problem(file):
        raise TlsFileError(path, problem)


class _EncryptedKey(Exception):
    pass


def _refuse_password() -> str:
    raise _EncryptedKey


def _reason(error: ssl.SSLError) -> str:
    return f"OpenSSL reports {error.reason or 'an error'}"


class Signature(NamedTuple):
    """What `os.stat` shows of a file: a changed file has another signature."""

    modified_ns: int
    size: int
    inode: int


def signatures(files: tuple[Path, ...]) -> tuple[Signature | None, ...]:
    """The signature of each file, None for a file that cannot be found. Follows symbolic links. Blocks."""
    file_signatures: list[Signature | None] = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            file_signatures.append(None)
        else:
            file_signatures.append(Signature(status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(file_signatures)
