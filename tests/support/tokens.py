"""JSON Web Tokens for tests, and an issuer that serves its public keys (a JWKS) over HTTP."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, Key

ISSUER, AUDIENCE = "https://issuer.test/", "kvroute"
FIRST = ECKey.generate_key("P-256", {"kid": "first"})
STRANGER = ECKey.generate_key("P-256", {"kid": "first"})
"""Not the issuer's, with the name of one of its keys."""


class Issuer:
    """Serves a JWKS. Mutable: tests set `keys` and `is_up`; `reads` counts the requests."""

    def __init__(self) -> None:
        self.keys: list[Key] = [FIRST]
        self.is_up = True
        self.reads = 0
        self.url = ""

    async def serve(self, reader: Any, writer: Any) -> None:
        """Serve one connection; for `tcp_server`."""
        while True:
            await reader.readuntil(b"\r\n\r\n")
            self.reads += 1
            body = json.dumps({"keys": [key.as_dict(private=False) for key in self.keys]}).encode()
            status = b"200 OK" if self.is_up else b"500 No"
            writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
            await writer.drain()


def token(client: str = "auth0|1", key: Key = FIRST, alg: str = "ES256", **claims: Any) -> str:
    """A token that is valid for ten minutes, with other `claims`; None omits a claim."""
    now = int(time.time())
    usual = {"iss": ISSUER, "aud": ["x", AUDIENCE], "sub": client, "exp": now + 600, "iat": now}
    payload = {name: value for name, value in {**usual, **claims}.items() if value is not None}
    return jwt.encode(
        {"alg": alg, "kid": key.kid} if key.kid else {"alg": alg}, payload, key, algorithms=[alg]
    )


def unsigned() -> str:
    """A token of the algorithm `none`."""
    head = base64.urlsafe_b64encode(b'{"alg":"none","kid":"first"}').rstrip(b"=").decode()
    return f"{head}.{token().split('.')[1]}."
