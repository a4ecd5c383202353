import os
import resource

import pytest
from tests.support.sockets import listening

from kvroute.errors import NoResources
from kvroute.fleet.probe import ProbeFailure, Prober, probe_client
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.pool import ConnectionPool, Origin
from kvroute.upstream.transport import AnyWorkerTransport


@pytest.fixture
def without_descriptors():
    """The process has no free descriptor while the function's result is entered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def open_one() -> int | None:
        try:
            return os.open(os.devnull, os.O_RDONLY)
        except OSError:
            return None

    def take() -> None:
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        taken.extend(iter(open_one, None))

    yield take
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for each in taken:
        os.close(each)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_gateway_without_descriptors_does_not_blame_the_worker(without_descriptors, host):
    with listening() as port:
        pool = ConnectionPool(Origin("http", host, port), UpstreamOptions(), None)
        without_descriptors()
        with pytest.raises(NoResources):
            await pool.acquire(connect_timeout_s=5)


async def test_a_probe_without_descriptors_says_nothing_about_the_worker(without_descriptors):
    with listening() as port:
        async with probe_client(AnyWorkerTransport(UpstreamOptions())) as client:
            without_descriptors()
            failure = await Prober(client, timeout_s=5).health(f"http://127.0.0.1:{port}")

    assert isinstance(failure, ProbeFailure)
    assert failure.is_own
    assert not failure.refused
