"""Fill in the digests of images in a Helm values file, from the registries that have the images.

    python scripts/pin_images.py [charts/kvroute/values.yaml]

Changes each `digest:` next to an `image:`, or next to a `repository:` with a registry or an owner and its
`tag:`. A digest is the SHA-256 of the manifest that the registry sends for the tag. Exit code 1: a registry
has no such image, or sends another manifest than it announces; 2: a registry cannot be reached. The file is
then unchanged.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import httpx

VALUES = Path(__file__).parent.parent / "charts" / "kvroute" / "values.yaml"
KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_MANIFEST_BYTES = 4 << 20
TIMEOUT_S = 30.0
_LINE = re.compile(r'^(\s*)(image|repository|tag|digest):\s*("[^"]*"|[^\s#]*)(.*)$')


class Problem(Exception):
    """Why there is no digest. `code` is the exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Image(NamedTuple):
    registry: str
    """An address with scheme."""
    name: str
    tag: str

    @classmethod
    def of(cls, reference: str) -> Image:
        """`[HOST/]NAME:TAG`, by Docker's rules."""
        path, _, tag = reference.rpartition(":")
        if not path or "/" in tag:
            path, tag = reference, "latest"
        host, slash, rest = path.partition("/")
        if slash and ("." in host or ":" in host or host == "localhost"):
            is_local = host.partition(":")[0] in ("localhost", "127.0.0.1")
            return cls(f"{'http' if is_local else 'https'}://{host}", rest, tag)
        return cls("https://registry-1.docker.io", path if slash else f"library/{path}", tag)


def digest_of(image: Image, client: httpx.Client) -> str:
    """The digest of the image's manifest. Raises Problem."""
    url = f"{image.registry}/v2/{image.name}/manifests/{image.tag}"
    headers = {"accept": ", ".join(KINDS)}
    try:
        answer = client.get(url, headers=headers)
        if answer.status_code == 401:
            answer = client.get(url, headers=headers | _authorization(answer, client))
    except httpx.HTTPError as error:
        raise Problem(2, f"{image.registry} cannot be reached: {type(error).__name__}") from error
    if answer.status_code != 200 or len(answer.content) > MAX_MANIFEST_BYTES:
        raise Problem(1, f"{url} answers {answer.status_code} with {len(answer.content)} bytes")
    found = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    announced = answer.headers.get("docker-content-digest", found)
    if announced != found:
        raise Problem(1, f"{url} announces {announced}, but sends the manifest {found}")
    return found


def _authorization(refused: httpx.Response, client: httpx.Client) -> dict[str, str]:
    """The header with an anonymous token from the service that a registry names."""
    scheme, _, text = refused.headers.get("www-authenticate", "").partition(" ")
    fields = dict(re.findall(r'(\w+)="([^"]*)"', text))
    if scheme.lower() != "bearer" or "realm" not in fields:
        raise Problem(1, f"{refused.url} needs credentials")
    realm = fields.pop("realm")
    answer = client.get(realm, params=fields)
    token = answer.json().get("token") if answer.status_code == 200 else None
    if not isinstance(token, str):
        raise Problem(1, f"{realm} gives no token: {answer.status_code}")
    return {"authorization": f"Bearer {token}"}


def pinned(text: str, client: httpx.Client) -> str:
    """The values file with digests. Raises Problem."""
    known: dict[str, dict[str, str]] = {}
    """What the lines of one depth have said since a line of a lower depth."""
    lines = []
    for line in text.splitlines(keepends=True):
        match = _LINE.match(line.rstrip("\n"))
        depth = line[: len(line) - len(line.lstrip())]
        if line.strip() and not line.lstrip().startswith("#"):
            known = {each: said for each, said in known.items() if len(each) <= len(depth)}
        if match is not None:
            _, key, value, rest = match.groups()
            said = known.setdefault(depth, {})
            reference = _reference(said)
            if key == "digest" and reference:
                line = f'{depth}digest: "{digest_of(Image.of(reference), client)}"{rest}\n'
            said[key] = value.strip('"')
        lines.append(line)
    return "".join(lines)


def _reference(said: dict[str, str]) -> str:
    if "image" in said:
        return said["image"]
    repository, tag = said.get("repository", ""), said.get("tag", "")
    return f"{repository}:{tag}" if "/" in repository and tag else ""


def main(arguments: list[str]) -> int:
    file = Path(arguments[0]) if arguments else VALUES
    text = file.read_text(encoding="utf-8")
    try:
        with httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client:
            changed = pinned(text, client)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return problem.code
    file.write_text(changed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
