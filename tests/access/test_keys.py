import pytest

from kvroute.access.keys import AdminKeys, KeyCheck, fingerprint
from kvroute.errors import Unauthorized

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


def test_admin_keys_are_identified_by_their_fingerprints():
    keys = AdminKeys(["one", "two"])

    assert keys.owner([(b"authorization", b"Bearer one")]) == fingerprint("one")
    assert keys.owner([(b"authorization", b"bearer two ")]) == fingerprint("two")
    assert fingerprint("one") != fingerprint("two")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer three")],
        [(b"authorization", b"Basic one")],
        [(b"authorization", b"one")],
        [(b"x-api-key", b"one")],
        [(b"authorization", b"Bearer three"), (b"authorization", b"Bearer one")],
    ],
)
@pytest.mark.parametrize("keys", [[], ["one", "two"]])
def test_no_other_key_is_an_admin_key(keys, headers):
    with pytest.raises(Unauthorized):
        AdminKeys(keys).owner(headers)


def test_an_empty_admin_key_which_every_request_would_have_is_refused():
    with pytest.raises(ValueError, match="empty"):
        AdminKeys([""])
