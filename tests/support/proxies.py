"""Programs of the system in front of a gateway: curl as a client, nginx and HAProxy as proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from tests.support.certificates import Authority, Pair
from tests.support.programs import program
from tests.support.sockets import free_port
from tests.support.waiting import until

DEADLINE_S = 60.0
PROXIES = ("nginx", "haproxy")
_NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass https://{address};
      proxy_buffering off;
      proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_ssl_verify on; proxy_ssl_name localhost; proxy_ssl_trusted_certificate {authority};
      proxy_ssl_certificate {client.cert}; proxy_ssl_certificate_key {client.key};
    }}
  }}
}}
"""
_HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 30s
  timeout server 30s
frontend clients
  bind 127.0.0.1:{port}
  default_backend gateways
backend gateways
  option httpchk GET /ready
  default-server ssl verify required ca-file {authority} sni str(localhost) verifyhost localhost
  server one {address} crt {both} check inter 500ms
"""


async def output_of(*words: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(DEADLINE_S):
        written, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, written.decode("utf-8", "replace")


async def curl(url: str, *words: str) -> tuple[int, str]:
    """Exit code and output of curl."""
    return await output_of(program("curl"), "-sS", "--noproxy", "*", "--max-time", "30", *words, url)


@asynccontextmanager
async def proxied(
    name: str, address: tuple[str, int], folder: Path, authority: Authority, client: Pair
) -> AsyncIterator[str]:
    """The URL of a proxy that reaches a gateway by TLS, with a client certificate; ready to be used.

    `name` is one of PROXIES. The proxy trusts certificates of `authority` only.
    """
    (host, gateway_port), port, both = address, free_port(), folder / "proxy.both.pem"
    both.write_bytes(client.cert.read_bytes() + client.key.read_bytes())
    text = (_NGINX if name == "nginx" else _HAPROXY).format(
        folder=folder,
        port=port,
        address=f"{host}:{gateway_port}",
        authority=authority.file,
        client=client,
        both=both,
    )
    file = folder / f"{name}.conf"
    file.write_text(text)
    words = ["-p", str(folder), "-c", str(file)] if name == "nginx" else ["-db", "-q", "-f", str(file)]
    process = await asyncio.create_subprocess_exec(program(name), *words, stderr=asyncio.subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        assert process.returncode is None
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                return (await http.get(f"{url}/ready")).status_code == 200
            except httpx.TransportError:
                return False

    try:
        await until(answers, within_s=DEADLINE_S, every_s=0.05)
        yield url
    finally:
        process.kill()
        await process.wait()
