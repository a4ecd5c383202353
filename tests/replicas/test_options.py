from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvroute.replicas.options import SharingOptions

URL = "redis://10.0.0.9:6379"
KEY = "a secret of all members"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"url": "redis+sentinel://10.0.0.9:26379"}, "Sentinel is not supported"),
        ({"url": "http://10.0.0.9"}, "must be redis://"),
        ({"url": "redis://"}, "must be redis://"),
        ({"url": f"{URL}?ssl_cert_reqs=none"}, "must be redis://"),
        ({"url": f"{URL}/name"}, "must be redis://"),
        ({"url": URL, "key": "short"}, "at least 16 characters"),
        ({"url": URL, "fleet": "a b"}, "1 to 63 letters"),
        ({"url": URL, "fleet": ""}, "1 to 63 letters"),
        ({"key": KEY}, "url: is not set"),
        ({"url": URL, "tls": {"ca_file": "ca.pem"}}, "starts with rediss://"),
    ],
)
def test_wrong_options_are_refused_in_words_without_secrets(fields, problem):
    with pytest.raises(ValidationError, match=problem) as refused:
        SharingOptions(**fields)

    assert all(KEY not in each["msg"] for each in refused.value.errors())


def test_options_that_share():
    options = SharingOptions(url=f"{URL}/0", key=KEY, member="g1")

    assert (options.is_on, options.uses_tls, options.name) == (True, False, "g1")
    assert options.mac_key == KEY.encode()
    assert SharingOptions(url="rediss://10.0.0.9").uses_tls


def test_sharing_is_off_and_empty_secrets_are_none():
    options = SharingOptions(url="", key="")

    assert (options.is_on, options.mac_key) == (False, None)
    assert options.name, "the host's name"
