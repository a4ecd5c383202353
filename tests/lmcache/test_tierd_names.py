"""The names that LMCache in the engine gives to its objects, and the daemon's list of changes."""

from __future__ import annotations

import pytest

from kvroute.errors import WireError
from kvroute.lmcache.tierd import StoreChanges, StoredKind, StoredPart, decode_changes, parse_name

KIND = StoredKind("/models/small", 4, "bfloat16")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("/models/small@4@2@1f3a@bfloat16", StoredPart(KIND, 2, 0x1F3A)),
        ("/models/small@4@0@-7fffffffffffffff@bfloat16", StoredPart(KIND, 0, -0x7FFFFFFFFFFFFFFF)),
        ("/models/small@4@0@ffffffffffffffff@bfloat16", StoredPart(KIND, 0, 2**64 - 1)),
        ("vllm@/models/small@4@2@1f3a@bfloat16", StoredPart(KIND, 2, 0x1F3A)),
        ("org/a@b@1@0@1@half", StoredPart(StoredKind("org/a@b", 1, "half"), 0, 1)),
        ("/models/small@4@2@1f3a@bfloat16@kvroute%space", StoredPart(KIND, 2, 0x1F3A, "space")),
    ],
    ids=["plain", "negative", "unsigned", "0.3.9", "at sign in the model", "adapter"],
)
def test_names_are_read(name: str, part: StoredPart) -> None:
    assert parse_name(name) == part


@pytest.mark.parametrize(
    "name",
    [
        "",
        "k",
        "/models/small@4@2@1f3a@bfloat16@user%me",
        "/models/small@4@2@1f3a@bfloat16@user%me@kvroute%space",
        "/models/small@4@2@1f3a@bfloat16@17",
        "/models/small@4@4@1f3a@bfloat16",
        "/models/small@x@0@1f3a@bfloat16",
        "/models/small@1@0@nohex@bfloat16",
        f"/models/small@1@0@{'f' * 17}@bfloat16",
        f"/models/small@01000100@0@{'ab' * 32}",
        f"/models/small@01000100@0@{'ab' * 32}@salt",
    ],
)
def test_other_names_are_not(name: str) -> None:
    """A client's own tags, a part of one layer, a rank beyond the world, names of LMCache's servers."""
    assert parse_name(name) is None


def test_the_list_of_changes_is_read_and_anything_else_refused() -> None:
    body = b'{"incarnation":"ab","number":3,"whole":true,"stored":["k"],"removed":[],"more":1}'

    assert decode_changes(body) == StoreChanges("ab", 3, True, ["k"], [])
    for wrong in (b"", b"[]", b'{"incarnation":"ab"}', b'{"incarnation":"ab","number":-1}', b"\xff"):
        with pytest.raises(WireError):
            decode_changes(wrong)
