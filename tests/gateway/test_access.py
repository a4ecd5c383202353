import pytest

from kvroute.errors import Forbidden, Unauthorized
from kvroute.gateway.access import KeyCheck, check_admin

KEYS = KeyCheck(["one", "two"])


@pytest.mark.parametrize(
    "headers",
    [[(b"authorization", b"Bearer one")], [(b"authorization", b"bearer two")], [(b"x-api-key", b"one")]],
)
def test_any_of_the_keys_opens(headers):
    KEYS.check(headers)


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"Bearer three")], [(b"authorization", b"one")], [(b"x-api-key", b"on")]],
)
def test_anything_else_is_unauthorized(headers):
    with pytest.raises(Unauthorized):
        KEYS.check(headers)


def test_without_keys_everyone_may():
    KeyCheck([]).check([])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.8.8.8"])
def test_admin_without_a_key_is_for_loopback(host):
    check_admin(KeyCheck([]), [], host)


@pytest.mark.parametrize("host", ["10.0.0.1", "unix", "::2", None])
def test_admin_without_a_key_is_not_for_others(host):
    with pytest.raises(Forbidden):
        check_admin(KeyCheck([]), [], host)


def test_admin_with_a_key_asks_loopback_for_it_too():
    with pytest.raises(Unauthorized):
        check_admin(KEYS, [], "127.0.0.1")
    check_admin(KEYS, [(b"authorization", b"Bearer one")], "10.0.0.1")
