import pytest

from kvroute.http.authority import authority, host_name, is_loopback


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Gateway.Example", ("gateway.example", None)),
        ("gateway.example.:8080", ("gateway.example", 8080)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[0:0::1]:8080", ("::1", 8080)),
        ("", None),
        (".", None),
        (":8080", None),
        ("a:b", None),
        ("a:123456", None),
        ("a b", None),
        ("a/b", None),
        ("user@a", None),
        ("::1", None),
        ("[nothing]", None),
        ("[1:2]", None),
        ("a,b", None),
    ],
)
def test_host_and_port(text, expected):
    assert authority(text) == expected


def test_a_name_has_no_port_and_an_address_needs_no_brackets():
    assert host_name("A.example") == "a.example"
    assert host_name("::1") == host_name("[::1]") == "::1"
    assert host_name("10.0.0.1") == "10.0.0.1"
    assert host_name("a:80") is None
    assert host_name("https://a") is None


def test_loopback_is_a_name_and_two_networks():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.1.2.3", "::1"]))
    assert not any(map(is_loopback, ["10.0.0.1", "localhost.example", "127.0.0.1.example", "0.0.0.0", ""]))
