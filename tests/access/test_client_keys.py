import hashlib
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.clocks import ManualClock
from tests.support.waiting import until

from kvroute.access.client_keys import Bucket, KeyRing, SharedUse, check_model
from kvroute.access.key_file import new_key, read_keys
from kvroute.access.keys import KeyCheck
from kvroute.errors import BodyTooLarge, ConfigError, Forbidden, KeyLimitReached, PromptTooLong, Unauthorized
from kvroute.metrics import SERIES_KEPT_S, Metrics
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request

HASH = "sha256:" + hashlib.sha256(b"secret").hexdigest()
OTHER = "sha256:" + hashlib.sha256(b"other").hexdigest()
REQUEST = parse_request(ENDPOINTS["/v1/chat/completions"], b'{"model": "m", "messages": []}')


def ring(clock=None, **fields) -> KeyRing:
    text = json.dumps({"keys": [{"name": "a", "hash": [HASH, OTHER], **fields}]})
    return KeyRing(read_keys(text, "f"), Metrics(), clock or ManualClock(0.0))


def headers(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def admit(keys: KeyRing, strategy: bytes = b"", now: float = 0.0):
    client = keys.find(b"secret")
    assert client is not None
    return keys.admit(client, REQUEST, strategy, now)


def end(use, tokens: int = 0, *, attempts: int = 1, status: int = 200) -> None:
    use.end(0.0, tokens, 0, attempts=attempts, status=status)


# --- the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "document"),
        ("keys: 3", 1, "keys"),
        ("key: []", 1, "key"),
        ("keys:\n- name: a\n", 2, "keys[0]: Value error, set `hash` or `jwt`"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  colour: red\n", 4, "keys[0].colour: unknown field"),
        ("keys:\n- name: a\n  hash: secret-itself\n", 3, "keys[0].hash[0]"),
        ("keys:\n- name: a\n  hash: []\n", 2, "keys[0]: Value error, set `hash` or `jwt`"),
        (f"keys:\n- name: a b\n  hash: {HASH}\n", 2, "keys[0].name"),
        (f"keys:\n- name: a\n  hash: {HASH}\n- name: a\n  hash: {OTHER}\n", 4, "the name is also"),
        (f"keys:\n- name: a\n  hash: {HASH}\n- name: b\n  hash: {HASH}\n", 5, "the hash is also"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  hash: {OTHER}\n", 4, "given twice"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  expires: 2030-01-01T00:00:00\n", 4, "timezone"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  strategies: [magic]\n", 4, "a strategy is none of"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  limits:\n    body_bytes: -1\n", 5, "limits.body_bytes"),
        ("keys:\n- [secret-itself\n", 3, "not YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_line_and_reason_and_without_its_values(text, line, reason):
    with pytest.raises(ConfigError) as caught:
        read_keys(text, "keys.yaml")

    assert f"keys.yaml:{line}: " in str(caught.value)
    assert reason in str(caught.value)
    assert "secret-itself" not in str(caught.value)


def test_a_new_key_opens_with_its_own_entry():
    key, entry = new_key("team-a")
    keys = KeyRing(read_keys(yaml.safe_dump({"keys": yaml.safe_load(entry)}), "f"), Metrics(), ManualClock())

    found = keys.find(key.encode())

    assert found is not None
    assert found.key.name == "team-a"
    assert key not in entry
    assert len(key) >= 43
    with pytest.raises(ConfigError):
        new_key("two words")


# --- keys -------------------------------------------------------------------------------------------------


def test_named_keys_and_keys_without_a_name_are_valid_together():
    check = KeyCheck(["plain"], ring())

    assert check.matches(headers("plain"))
    assert check.matches(headers("secret"))
    assert check.matches([(b"x-api-key", b"other")])
    assert check.client(headers("plain")) is None
    client = check.client(headers("other"))
    assert client is not None
    assert client.key.name == "a"
    for wrong in ("", "Secret", "secret2", HASH, HASH.removeprefix("sha256:")):
        assert not check.matches(headers(wrong))
        with pytest.raises(Unauthorized):
            check.client(headers(wrong))


def test_a_key_that_came_before_is_known_by_its_header_alone():
    keys = ring()
    check = KeyCheck([], keys)
    assert keys.seen(b"Bearer secret") is None

    client = check.client(headers("secret"))

    assert client is not None
    assert keys.seen(b"Bearer secret") is client
    assert keys.seen(b"Bearer other") is None
    keys.install(())
    assert keys.seen(b"Bearer secret") is None


@pytest.mark.parametrize(
    "sent",
    [
        [(b"authorization", b"Basic x"), (b"x-api-key", b"secret")],
        [(b"x-api-key", b"secret")],
        [(b"authorization", b"bearer  secret")],
    ],
)
def test_a_header_that_is_not_the_key_alone_is_never_remembered(sent):
    keys = ring()
    check = KeyCheck([], keys)

    assert check.client(sent) is not None

    for authorization in (b"", b"Basic x", b"bearer  secret", b"Bearer secret"):
        assert keys.seen(authorization) is None


def test_a_key_that_came_before_expires():
    clock = ManualClock(0.0, epoch=1_893_455_999.0)
    keys = ring(clock, expires="2030-01-01T00:00:00Z")
    KeyCheck([], keys).client(headers("secret"))
    assert keys.seen(b"Bearer secret") is not None

    clock.time = 1.0

    assert keys.seen(b"Bearer secret") is None


def test_a_file_without_keys_admits_nobody():
    check = KeyCheck([], KeyRing(read_keys("keys: []", "f"), Metrics(), ManualClock()))

    assert not check.is_open
    assert not check.matches([])


def test_a_key_is_refused_from_its_expiry_on():
    clock = ManualClock(0.0, epoch=1_893_455_999.0)
    check = KeyCheck([], ring(clock, expires="2030-01-01T00:00:00Z"))
    check.check(headers("secret"))

    clock.time = 1.0

    assert not check.matches(headers("secret"))
    with pytest.raises(Unauthorized, match="expired") as caught:
        check.check(headers("secret"))
    assert caught.value.error_code == "expired_api_key"
    with pytest.raises(Unauthorized, match="expired"):
        check.client(headers("secret"))


def test_a_key_permits_models_by_name_and_through_aliases():
    client = ring(models=["big"]).find(b"secret")
    assert client is not None

    def resolve(name):
        return {"alias": "big", None: "big"}.get(name, name)

    for permitted in ("big", "alias", None):
        check_model(client, permitted, resolve)
    with pytest.raises(Forbidden) as caught:
        check_model(client, "small", resolve)
    assert (caught.value.param, caught.value.error_code) == ("model", "model_not_permitted")


def test_a_key_permits_strategies_for_the_header():
    keys = ring(strategies=["roundrobin"])

    admit(keys, b"roundrobin")
    admit(keys, b"")
    with pytest.raises(Forbidden) as caught:
        admit(keys, b"session")
    assert caught.value.param == "x-kvroute-strategy"


# --- limits -----------------------------------------------------------------------------------------------


def test_requests_per_minute_refill_evenly():
    keys = ring(limits={"requests_per_minute": 6})
    for _ in range(6):
        admit(keys)

    with pytest.raises(KeyLimitReached, match=r"limits\.requests_per_minute of 6") as caught:
        admit(keys)
    assert caught.value.retry_after_s == 10
    admit(keys, now=10.0)
    with pytest.raises(KeyLimitReached):
        admit(keys, now=10.0)


def test_tokens_are_charged_at_the_end_and_checked_at_the_next_request():
    keys = ring(limits={"tokens_per_minute": 60})
    first, second = admit(keys), admit(keys)
    end(first, 59)
    end(admit(keys), 1000, attempts=0, status=503)  # no worker got it
    end(admit(keys), 1000, status=500)
    end(second, 61, status=499)
    end(second, 61, status=499)

    with pytest.raises(KeyLimitReached, match="tokens_per_minute") as caught:
        admit(keys)

    assert caught.value.retry_after_s == 61
    with pytest.raises(KeyLimitReached):
        admit(keys, now=60.9)
    admit(keys, now=61.0)


def test_requests_in_flight_are_released_once():
    keys = ring(limits={"concurrent_requests": 1})
    use = admit(keys)
    with pytest.raises(KeyLimitReached, match="concurrent_requests"):
        admit(keys)

    end(use)
    end(use)

    admit(keys)
    with pytest.raises(KeyLimitReached):
        admit(keys)


def test_bodies_and_prompts_have_limits():
    with pytest.raises(BodyTooLarge, match=r"limits\.body_bytes"):
        admit(ring(limits={"body_bytes": 10}))
    keys = ring(limits={"prompt_tokens": 10})
    client = admit(keys).client
    keys.check_prompt(client, 10)
    with pytest.raises(PromptTooLong, match=r"limits\.prompt_tokens"):
        keys.check_prompt(client, 11)


def test_limits_hold_for_all_processes_together():
    keys = ring(limits={"requests_per_minute": 4, "concurrent_requests": 3})
    keys.used_elsewhere("other", SharedUse("a", 2, 0, 2, 0, in_flight=2))
    admit(keys)

    with pytest.raises(KeyLimitReached, match="concurrent_requests"):
        admit(keys)
    keys.used_elsewhere("other", SharedUse("a", 0, 0, 3, 0, in_flight=0))  # a message between was lost
    with pytest.raises(KeyLimitReached, match="requests_per_minute"):
        admit(keys)


def test_use_beyond_a_limit_is_counted_when_it_is_seen():
    clock = ManualClock(0.0)
    keys = ring(clock, limits={"requests_per_minute": 4})
    for _ in range(3):
        admit(keys)

    keys.used_elsewhere("other", SharedUse("a", 3, 0, 3, 0, in_flight=3))

    overshoot = keys._metrics.key_overshoot.labels("a", "requests_per_minute")
    assert overshoot.value == pytest.approx(2.0)


def test_requests_of_a_lost_process_are_no_longer_in_flight():
    keys = ring(limits={"concurrent_requests": 2})
    keys.used_elsewhere("other", SharedUse("a", 2, 0, 2, 0, in_flight=2))
    with pytest.raises(KeyLimitReached):
        admit(keys)

    keys.peer_gone("other")

    admit(keys)


def test_what_a_process_uses_while_it_is_lost_is_charged_when_it_is_heard_again():
    clock = ManualClock(0.0)
    keys = ring(clock, limits={"requests_per_minute": 6, "tokens_per_minute": 600})
    keys.used_elsewhere("other", SharedUse("a", 1, 10, 1, 10, in_flight=1))
    keys.peer_gone("other")
    clock.time = 5.0

    keys.used_elsewhere("other", SharedUse("a", 0, 0, 5, 10, in_flight=0))  # its state: the totals alone
    keys.used_elsewhere("other", SharedUse("a", 1, 20, 6, 30, in_flight=1))

    assert keys.refilling() == [("a", 6, 20)], "half of the first, and 5 since"
    with pytest.raises(KeyLimitReached):
        admit(keys, now=5.0)


def test_a_key_that_is_first_used_in_a_silence_is_charged_after_it():
    keys = ring(limits={"requests_per_minute": 6})
    keys.peer_gone("other")

    keys.used_elsewhere("other", SharedUse("a", 0, 0, 5, 0, in_flight=0))

    assert keys.refilling() == [("a", 5, 0)]


def test_of_a_long_silence_only_the_last_minute_is_charged():
    """A client within its limits would else be refused for as long as the silence was."""
    clock = ManualClock(0.0)
    keys = ring(clock, limits={"requests_per_minute": 6})
    keys.used_elsewhere("other", SharedUse("a", 1, 0, 1, 0, in_flight=0))
    keys.peer_gone("other")
    clock.time = 600.0

    keys.used_elsewhere("other", SharedUse("a", 0, 0, 31, 0, in_flight=0))
    assert keys.refilling() == [("a", 3, 0)]

    keys.peer_gone("other")
    clock.time = 700.0
    keys.used_elsewhere("other", SharedUse("a", 2, 0, 2, 0, in_flight=0))
    assert keys.refilling() == [("a", 2, 0)], "a new process of the same number"


async def test_a_process_that_joins_charges_what_has_not_refilled():
    clock = ManualClock(0.0)
    one, joins = (ring(clock, limits={"requests_per_minute": 4, "tokens_per_minute": 600}) for _ in range(2))
    one.share(lambda use: None)
    for _ in range(3):
        end(admit(one))
    clock.time = 15.0  # one has refilled
    for use in one.own_uses():
        joins.used_elsewhere("one", use)
    for use in one.refilling():
        joins.charge(*use)

    admit(joins, now=15.0)
    admit(joins, now=15.0)
    with pytest.raises(KeyLimitReached):
        admit(joins, now=15.0)


async def test_a_use_is_published_with_the_totals_a_moment_later():
    published: list[SharedUse] = []
    keys = ring(limits={"requests_per_minute": 9, "tokens_per_minute": 900})
    keys.share(published.append)
    first, second = admit(keys), admit(keys)
    end(first, 10)
    await until(lambda: published)

    assert published == [SharedUse("a", 2, 10, 2, 10, in_flight=1)]
    end(second, 5)
    await until(lambda: len(published) == 2)
    assert published[1] == SharedUse("a", 0, 5, 2, 15, in_flight=0)


async def test_a_request_of_a_removed_key_is_not_published_for_the_key_that_returns():
    published: list[SharedUse] = []
    keys = ring(limits={"requests_per_minute": 9, "tokens_per_minute": 900})
    text = json.dumps({"keys": [{"name": "a", "hash": HASH, "limits": {"tokens_per_minute": 900}}]})
    others = json.dumps({"keys": [{"name": "b", "hash": HASH}]})
    keys.share(published.append)
    old = admit(keys)
    await until(lambda: published)

    keys.install(read_keys(others, "f"))
    keys.install(read_keys(text, "f"))
    end(old, 800)
    new = admit(keys)
    end(new, 5)
    await until(lambda: len(published) > 1)

    assert published[1:] == [SharedUse("a", 1, 5, 1, 5, in_flight=0)]


def test_totals_that_begin_again_are_charged_as_they_are():
    keys = ring(limits={"tokens_per_minute": 100})
    keys.used_elsewhere("other", SharedUse("a", 5, 90, 5, 90, 0))
    keys.used_elsewhere("other", SharedUse("a", 1, 9, 1, 9, 0))
    admit(keys)

    keys.used_elsewhere("other", SharedUse("a", 1, 9, 2, 18, 0))

    with pytest.raises(KeyLimitReached):
        admit(keys)


def test_a_new_file_keeps_what_a_name_has_used():
    keys = ring(limits={"requests_per_minute": 2})
    admit(keys)
    text = json.dumps({"keys": [{"name": "a", "hash": HASH, "limits": {"requests_per_minute": 3}}]})

    keys.install(read_keys(text, "f"))

    assert keys.find(b"other") is None
    admit(keys)
    admit(keys)
    with pytest.raises(KeyLimitReached):
        admit(keys)


def names_in(metrics: Metrics) -> set[str]:
    return {
        sample.labels["key"]
        for family in metrics.collect()
        for sample in family.samples
        if "key" in sample.labels
    }


def test_the_series_of_a_removed_key_stay_for_a_while_only():
    clock, metrics = ManualClock(0.0), Metrics()
    both = read_keys(json.dumps({"keys": [{"name": "a", "hash": HASH}, {"name": "b", "hash": OTHER}]}), "f")
    keys = KeyRing(both, metrics, clock)
    end(admit(keys))
    metrics.queue_wait.labels("m", "a").append(0.1)
    metrics.queue_shed.labels("m", "b", "full").inc()
    metrics.queue_waiting.labels("m", "a").inc()
    keys.install(both[1:])
    clock.time = SERIES_KEPT_S - 1.0
    kept = names_in(metrics)
    clock.time = SERIES_KEPT_S
    late = names_in(metrics)

    assert kept == {"a", "b"}
    assert late == {"a", "b"}  # one request of `a` still waits
    assert {
        family.name for family in metrics.collect() for each in family.samples if "a" in each.labels.values()
    } == {"kvroute_queue_waiting"}


def test_a_key_that_returns_keeps_its_series():
    clock, metrics = ManualClock(0.0), Metrics()
    keys = read_keys(json.dumps({"keys": [{"name": "a", "hash": HASH}]}), "f")
    held = KeyRing(keys, metrics, clock)
    end(admit(held))
    held.install(())
    clock.time = 10.0
    held.install(keys)
    clock.time = 2 * SERIES_KEPT_S

    assert names_in(metrics) == {"a"}
    held.install(())
    clock.time = 3 * SERIES_KEPT_S
    assert names_in(metrics) == set()


def test_a_bucket_holds_at_most_a_minute_of_its_limit():
    bucket = Bucket(60.0, 0.0)
    bucket.take(60.0, 0.0)

    assert bucket.wait_s(1.0, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(60.0, 10_000.0) == 0.0
    bucket.take(60.0, 10_000.0)
    assert bucket.wait_s(1.0, 10_000.0) == pytest.approx(1.0)


@settings(max_examples=200)
@given(
    per_minute=st.integers(1, 10_000),
    start=st.floats(0.0, 1e6),
    steps=st.lists(st.tuples(st.floats(0.0, 90.0), st.integers(1, 20_000)), max_size=20),
)
def test_a_bucket_refills_like_a_level_that_rises_evenly(per_minute, start, steps):
    bucket, level, now = Bucket(per_minute, start), float(per_minute), start
    for pause, amount in steps:
        now += pause
        level = min(per_minute, level + pause * per_minute / 60)
        expected = max(0.0, (1 - level) * 60 / per_minute)
        assert bucket.wait_s(1.0, now) == pytest.approx(expected, abs=1e-5)
        bucket.take(amount, now)
        level -= amount


def test_a_new_limit_keeps_what_was_used_of_the_old_one():
    bucket = Bucket(60.0, 0.0)
    bucket.take(50.0, 0.0)

    bucket.resize(120.0, 10.0)  # 10 have refilled: 40 are used

    assert bucket.wait_s(80.0, 10.0) == 0.0
    assert bucket.wait_s(82.0, 10.0) == pytest.approx(1.0)
