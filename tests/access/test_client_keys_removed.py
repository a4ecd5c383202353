"""A key that is removed while its requests run, and its use in other processes."""

import pytest
from tests.access.test_client_keys import admit, end, ring
from tests.support.waiting import until

from kvroute.access.client_keys import SharedUse
from kvroute.errors import KeyLimitReached


@pytest.mark.parametrize("ends", ["while the key is removed", "after it has returned"])
async def test_others_count_a_request_of_a_removed_key_until_it_ends(ends):
    one, other = (ring(limits={"concurrent_requests": 1}) for _ in range(2))
    client = one.find(b"secret")
    assert client is not None
    sent: list[SharedUse] = []

    def send(use: SharedUse) -> None:
        other.used_elsewhere("one", use)
        sent.append(use)

    def install(*keys) -> None:
        one.install(keys)
        other.install(keys)

    one.share(send)
    running = admit(one)
    await until(lambda: sent)

    install()
    if ends == "after it has returned":
        install(client.key)
        with pytest.raises(KeyLimitReached):
            admit(other)
    end(running)
    await until(lambda: len(sent) > 1)
    install(client.key)

    admit(other)
