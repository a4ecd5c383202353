"""Mutated specs, configurations, and requests to the node's cache daemon: refused in words, never by a traceback."""

from __future__ import annotations

import random
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.cases import Cases
from tests.fuzz.frames import Mutator
from tests.fuzz.lanes import Report

from kvroute.config.loading import load
from kvroute.deploy.spec.loading import read_spec
from kvroute.errors import ConfigError, InvalidRequest
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.routing.registry import STRATEGIES
from kvroute.tierd.http import BadRequest, parse_call

_CONFIGS = Path(__file__).parents[2] / "configs"
_DEADLINE_S = 5.0
ODD_YAML = (
    b": ", b"- ", b"\n", b"  ", b"\t", b"{", b"[", b"]", b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ", b"|", b">",
    b"'", b'"', b"#", b"%", b"@", b"`", b"? ", b"null", b"~", b"yes", b".nan", b".inf", b"-1", b"0x10", b"1_000",
    b"99999999999999999999", b"2001-01-01", b"\x00", b"\xff", b"\xef\xbb\xbf", b"---\n", b"...\n", b"[" * 300,
    b"{a: " * 300, b"a" * 5000, b"1" * 5000, b"\xf0\x9f\x98\x80", b"!!binary x", b"!!set {a}", b"0b1", b"1:30", b"=", b"${A}",
)  # fmt: skip
_CALLS = (
    b"/v1/kv/bucket/key", b"/v1/kv/bucket/key/leases?ttl_s=5&timeout_ms=10", b"/v1/leases/abc-1/release", b"/health", b"/metrics",
)  # fmt: skip
_ODD_CALL = (
    b"%",
    b"%00",
    b"%2f",
    b"/",
    b"?",
    b"&",
    b"=",
    b"nan",
    b"inf",
    b"-1",
    b"1e999",
    b"\xff",
    b"x" * 5000,
    b"&a=b" * 30,
    b"\xd9\xa2",
    b"_",
)


class _Documents:
    """`last` is what was read last. Mutable."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.last = b""
        self._file = folder / "kvroute.yaml"
        self._yaml, self._call = Mutator(rng, ODD_YAML), Mutator(rng, _ODD_CALL)
        self._cases = Cases(seed)
        files = [(file.name, file.read_bytes()) for file in sorted(_CONFIGS.glob("*.yaml"))]
        self._specs = [data for _, data in files if b"\nkind:" in data]
        self._configs = [data for name, data in files if b"\nkind:" not in data and "workers" not in name]

    def spec(self) -> None:
        self.last = self._yaml.change(self.rng.choice(self._specs), self._specs)
        read_spec(self.last.decode("utf-8", "replace"), strategies=list(STRATEGIES))

    def config(self) -> None:
        data = self.rng.choice(self._configs)
        if len(data) > 4000:  # a part of the reference is read more quickly
            sections = data.split(b"\n\n\n")
            data = b"\n".join(self.rng.sample(sections, min(2, len(sections))))[:6000]
        self.last = self._yaml.change(data, self._configs)
        self._file.write_bytes(self.last)
        try:
            load(file=self._file)
        except ConfigError:
            pass

    def call(self) -> None:
        self.last = target = self._call.change(self.rng.choice(_CALLS), _CALLS)
        try:
            parse_call(self.rng.choice([b"GET", b"PUT", b"POST", b"HEAD", b"X"]), target, 300.0)
        except BadRequest:
            pass

    def body(self) -> None:
        path = self.rng.choice(list(ENDPOINTS))
        self.last = body = (
            self._cases.form(True) if "audio" in path else self._cases.json_body(path, True, False)
        )
        try:
            parse_request(ENDPOINTS[path], body, "multipart/form-data; boundary=fuzzBoundary")
        except InvalidRequest:
            pass

    def step(self) -> str:
        target: Callable[[], None] = self.rng.choice(
            [self.spec, self.config, self.call, self.call, self.body, self.body]
        )
        target()
        return target.__name__


def fuzz_documents(count: int, seed: int, *, folder: Path | None = None) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        documents = _Documents(seed, Path(scratch))
        for _ in range(count):
            report.inputs += 1
            began, kind, text = time.process_time(), "", ""
            try:
                report.outcomes[documents.step()] += 1
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                own = [frame for frame in frames if "kvroute" in frame.filename] or frames
                kind = f"{type(error).__name__} in {Path(own[-1].filename).name} {own[-1].name}"
                text = "".join(traceback.format_exception(error))
            if time.process_time() - began > _DEADLINE_S:
                kind = kind or "slow"
            if kind:
                report.findings[kind] += 1
                if report.findings[kind] <= 3:
                    print(f"! {kind}\n{text[-3000:]}")
                    if folder is not None:
                        folder.mkdir(parents=True, exist_ok=True)
                        file = (
                            folder / f"document-{kind.replace(' ', '-')}.{seed}.{report.findings[kind]}.bin"
                        )
                        file.write_bytes(documents.last)
                        report.saved.append(file)
    return report
