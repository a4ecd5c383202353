"""Prompts made exact before they are routed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import generate_latest
from tests.support.clocks import ManualClock

from kvroute.fleet.fleet import Fleet
from kvroute.metrics import Metrics
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.relay.key_spaces import KeySpaces
from kvroute.relay.preparation import WINDOW, Preparer, TokenizerOutages
from kvroute.routing.strategy import ExactPrompt, Probed
from kvroute.tokens.exact import ExactPrompts, ExactTokens, Mode
from kvroute.tokens.options import TokensReason


@dataclass
class Workers:
    """Replaces a fleet and its tokenizer: workers tokenize, except dead ones."""

    urls: list[str]
    dead: set[str] = field(default_factory=set)
    why: TokensReason = TokensReason.WORKER_FAILED
    asked: list[str] = field(default_factory=list)
    deadlines_s: list[float | None] = field(default_factory=list)

    def is_remote(self, model: str) -> bool:
        return True

    def canonical(self, model: str) -> str:
        return model

    def view(self, model: str) -> Any:
        workers = [
            SimpleNamespace(spec=SimpleNamespace(url=url), facts=SimpleNamespace(adapters=()))
            for url in self.urls
        ]
        return SimpleNamespace(workers=workers)

    async def prompts(
        self,
        request: InferenceRequest,
        *,
        model: str,
        url: str,
        timeout_s: float | None = None,
        name: str = "",
    ) -> ExactPrompts | TokensReason:
        self.asked.append(url)
        self.deadlines_s.append(timeout_s)
        return self.why if url in self.dead else ExactPrompts(((5, 6, 7),), Mode.REMOTE)


def request() -> InferenceRequest:
    return parse_request(ENDPOINTS["/v1/completions"], b'{"model": "m", "prompt": "Hello"}')


def fixed(model: str, body_bytes: int) -> float:
    return 30.0


def no_adapters() -> KeySpaces:
    """A fleet without adapters."""
    return KeySpaces(Fleet(), adapters=True)


async def prepared(workers: Workers) -> Any:
    preparer = Preparer(cast(ExactTokens, workers), cast(Fleet, workers), Metrics(), no_adapters(), fixed)
    return await preparer.prepare(request(), "m")


async def test_another_worker_tokenizes_when_the_first_has_just_died() -> None:
    workers = Workers(["http://a", "http://b", "http://c"], dead={"http://a"})

    result = await prepared(workers)

    assert [prompt.tokens for prompt in result.prompts] == [3]
    assert workers.asked == ["http://a", "http://b"]


async def test_a_request_does_not_wait_for_worker_after_worker() -> None:
    workers = Workers(["http://a", "http://b", "http://c"], dead={"http://a", "http://b"})

    result = await prepared(workers)

    assert (result.prompts, result.why_not) == ((), "worker_failed")
    assert workers.asked == ["http://a", "http://b"]


async def test_a_failure_that_every_worker_would_repeat_is_not_retried() -> None:
    workers = Workers(["http://a", "http://b"], dead={"http://a"}, why=TokensReason.LATE)

    result = await prepared(workers)

    assert result.why_not == "late"
    assert workers.asked == ["http://a"]


@dataclass
class Busy(Workers):
    """Each question takes some CPU time."""

    spent_s: float = 0.0

    def prompts_if_quick(self, request: InferenceRequest, *, model: str) -> None:
        began = time.thread_time()
        sum(range(10_000))
        self.spent_s += time.thread_time() - began


async def test_cpu_time_of_exact_tokens_on_the_loop_is_counted_for_cached_and_computed_ones() -> None:
    workers = Busy(["http://a"])
    preparer = Preparer(cast(ExactTokens, workers), cast(Fleet, workers), Metrics(), no_adapters(), fixed)

    assert preparer.try_cached(request(), "m") is None
    before = preparer.cpu_s
    await preparer.prepare(request(), "m")

    assert before >= workers.spent_s > 0
    assert preparer.cpu_s > before


@dataclass
class Quick(Workers):
    """A tokenizer that knows at once, or says why not, or needs time (None)."""

    answer: ExactPrompts | TokensReason | None = None

    def prompts_if_quick(
        self, request: InferenceRequest, *, model: str
    ) -> ExactPrompts | TokensReason | None:
        return self.answer

    async def prompts(
        self,
        request: InferenceRequest,
        *,
        model: str,
        url: str,
        timeout_s: float | None = None,
        name: str = "",
    ) -> ExactPrompts | TokensReason:
        assert self.answer is not None
        return self.answer


async def nothing_stored(prompts: Sequence[ExactPrompt]) -> Sequence[Probed]:
    return [None] * len(prompts)


@pytest.mark.parametrize(
    "answer", [ExactPrompts((array("I", range(40)),) * 2, Mode.LOCAL), TokensReason.MEDIA]
)
async def test_cached_preparations_equal_awaited_ones(answer: ExactPrompts | TokensReason) -> None:
    workers = Quick(["http://a"], answer=answer)
    preparer = Preparer(
        cast(ExactTokens, workers),
        cast(Fleet, workers),
        Metrics(),
        no_adapters(),
        fixed,
        nothing_stored,
        lambda: False,
    )

    cached, waited = preparer.try_cached(request(), "m"), await preparer.prepare(request(), "m")

    assert cached is not None
    assert cached.why_not == waited.why_not
    assert [(each.tokens, list(each.keys), each.chunks.token_ids) for each in cached.prompts] == [
        (each.tokens, list(each.keys), each.chunks.token_ids) for each in waited.prompts
    ]


@pytest.mark.parametrize(
    ("answer", "is_probing"),
    [
        (None, False),
        (ExactPrompts((array("I", range(40)),), Mode.LOCAL), True),
        (ExactPrompts((array("I", range(2**16)),), Mode.LOCAL), False),  # its keys take several steps
    ],
)
def test_a_slow_preparation_is_never_cached(answer: ExactPrompts | None, is_probing: bool) -> None:
    workers = Quick(["http://a"], answer=answer)
    preparer = Preparer(
        cast(ExactTokens, workers),
        cast(Fleet, workers),
        Metrics(),
        no_adapters(),
        fixed,
        nothing_stored,
        lambda: is_probing,
    )

    assert preparer.try_cached(request(), "m") is None


async def test_the_deadline_is_that_of_the_model_and_the_body_and_both_workers_share_it() -> None:
    workers, asked = Workers(["http://a", "http://b"], dead={"http://a"}), []

    def timeout_s(model: str, body_bytes: int) -> float:
        asked.append((model, body_bytes))
        return 30.0

    preparer = Preparer(cast(ExactTokens, workers), cast(Fleet, workers), Metrics(), no_adapters(), timeout_s)
    await preparer.prepare(request(), "m")

    assert asked == [("m", len(request().body))]
    first, second = workers.deadlines_s
    assert first == 30.0
    assert second is not None
    assert second < 30.0


async def test_exact_and_approximate_prompts_are_counted_so_that_their_share_is_known() -> None:
    metrics = Metrics()
    good, late = Workers(["http://a"]), Workers(["http://a"], dead={"http://a"}, why=TokensReason.LATE)

    for workers in (good, good, good, late):
        await Preparer(
            cast(ExactTokens, workers), cast(Fleet, workers), metrics, no_adapters(), fixed
        ).prepare(request(), "m")

    page = generate_latest(metrics.registry).decode()
    assert 'kvroute_exact_prompts_total{model="m"} 3.0' in page
    assert 'kvroute_inexact_prompts_total{cause="late",model="m"} 1.0' in page
    assert "kvroute_token_wait_seconds_count 4.0" in page


async def test_a_high_share_of_late_prompts_is_logged_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    workers = Workers(["http://a"], why=TokensReason.LATE)
    preparer = Preparer(cast(ExactTokens, workers), cast(Fleet, workers), Metrics(), no_adapters(), fixed)

    for late in (10, 10, 0, 0):
        for number in range(WINDOW):
            workers.dead = {"http://a"} if number % 20 == 0 and late else set()
            await preparer.prepare(request(), "m")

    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "10 of the last 200 prompts for m" in caplog.text


async def test_prompts_that_never_have_exact_tokens_are_not_called_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = Workers(["http://a"], dead={"http://a"}, why=TokensReason.MEDIA)
    preparer = Preparer(cast(ExactTokens, workers), cast(Fleet, workers), Metrics(), no_adapters(), fixed)

    for _ in range(WINDOW):
        await preparer.prepare(request(), "m")

    assert not caplog.records


@pytest.mark.parametrize("reason", [TokensReason.WORKER_FAILED, TokensReason.LATE, TokensReason.FAILED])
async def test_a_tokenizer_that_does_not_answer_is_logged_after_three_prompts_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture, reason: TokensReason
) -> None:
    caplog.set_level("INFO")
    outages = TokenizerOutages(lambda: 0.0)

    for number, each in enumerate([reason, reason, None, reason, reason, reason, reason, None, None]):
        outages.count("m", each)
        assert outages.reasons == ({"m": reason} if number in (5, 6) else {})

    assert [record.getMessage() for record in caplog.records] == [
        f"kvaware: the last 3 prompts for m got no exact tokens ({reason}), and are routed by the route "
        "history",
        "kvaware: prompts for m get exact tokens again",
    ]


def test_a_tokenizer_that_fails_again_and_again_writes_two_lines_in_thirty_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = ManualClock()
    outages = TokenizerOutages(clock.now)

    for _ in range(600):
        clock.time += 0.1
        for each in (*[TokensReason.WORKER_FAILED] * 3, None):
            outages.count("m", each)

    assert len(caplog.records) == 4


def test_prompts_that_no_tokenizer_could_make_exact_are_no_outage() -> None:
    outages = TokenizerOutages(lambda: 0.0)

    for each in [TokensReason.WORKER_FAILED] * 2 + [TokensReason.MEDIA] * 3:
        outages.count("m", each)

    assert not outages.reasons


async def test_prompts_do_not_wait_one_after_another_for_a_tokenizer_that_hangs() -> None:
    """The first three do, and then one a second."""
    workers, clock = Workers(["http://a"], dead={"http://a"}, why=TokensReason.LATE), ManualClock()
    preparer = Preparer(
        cast(ExactTokens, workers), cast(Fleet, workers), Metrics(), no_adapters(), fixed, now=clock.now
    )

    async def asked(prompts: int) -> int:
        before = len(workers.asked)
        for _ in range(prompts):
            assert (await preparer.prepare(request(), "m")).why_not == "late"
        return len(workers.asked) - before

    assert [await asked(3), await asked(10)] == [3, 1]
    clock.time += 0.9
    assert await asked(10) == 0
    clock.time += 0.2
    assert await asked(10) == 1
    workers.dead = set()
    clock.time += 1.1
    for _ in range(10):
        assert (await preparer.prepare(request(), "m")).prompts
