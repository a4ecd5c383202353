import asyncio

import pytest

from kvroute.upstream.writes import Outbox, write_now


class Transport(asyncio.Transport):
    def __init__(self, log: list[tuple[str, bytes]], name: str = "a") -> None:
        super().__init__()
        self.log, self.name, self.closed = log, name, False

    def write(self, data):
        self.log.append((self.name, data))

    def writelines(self, list_of_data):
        self.log.extend((self.name, data) for data in list_of_data)

    def is_closing(self):
        return self.closed


@pytest.fixture
def log() -> list[tuple[str, bytes]]:
    return []


@pytest.fixture
async def outbox(log) -> Outbox:
    """An outbox that coalesces."""
    outbox, other = Outbox(), Transport([])
    for _ in range(20):
        outbox.send(other, b"x")
    await an_iteration()
    return outbox


async def an_iteration() -> None:
    """Returns when everything that the loop had to do by now is done."""
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(done.set_result, None)
    await done


async def test_an_iterations_writes_go_out_at_its_end_in_order(log, outbox):
    a, b = Transport(log), Transport(log, "b")
    outbox.send(a, b"1")
    outbox.send(b, b"2", b"body")
    outbox.send(a, b"3")
    assert not log
    await an_iteration()
    assert log == [("a", b"1"), ("b", b"2"), ("b", b"body"), ("a", b"3")]


async def test_every_iteration_has_an_end(log, outbox):
    a, began = Transport(log), outbox.flushes
    for number in (b"1", b"2"):
        outbox.send(a, number)
        await an_iteration()
    assert log == [("a", b"1"), ("a", b"2")]
    assert outbox.flushes == began + 2


async def test_many_writes_of_one_iteration_do_not_all_wait_for_its_end(log, outbox):
    a = Transport(log)
    for number in range(40):
        outbox.send(a, b"%d" % number)
    assert 0 < len(log) < 40
    await an_iteration()
    assert [data for _, data in log] == [b"%d" % number for number in range(40)]


async def test_waiting_writes_can_be_flushed_before_the_iteration_ends(log, outbox):
    a = Transport(log)
    outbox.send(a, b"1")
    began = outbox.flushes
    outbox.flush()
    assert log == [("a", b"1")]
    assert outbox.flushes == began + 1
    await an_iteration()
    outbox.flush()
    assert log == [("a", b"1")]
    assert outbox.flushes == began + 1


async def test_nothing_is_written_to_a_transport_that_was_closed(log, outbox):
    a, b = Transport(log), Transport(log, "b")
    outbox.send(a, b"1")
    outbox.send(b, b"2")
    a.closed = True
    await an_iteration()
    assert log == [("b", b"2")]


async def test_a_write_may_lead_to_another_one(log, outbox):
    class Answers(Transport):
        def write(self, data):
            super().write(data)
            if data == b"1":
                outbox.send(self, b"2")

    outbox.send(Answers(log), b"1")
    await an_iteration()
    await an_iteration()
    assert log == [("a", b"1"), ("a", b"2")]


def test_without_coalescing_a_write_goes_out_immediately(log):
    write_now(Transport(log), b"1")
    write_now(Transport(log), b"2", b"3")
    assert [data for _, data in log] == [b"1", b"2", b"3"]


async def test_one_write_an_iteration_does_not_wait(log):
    outbox, a = Outbox(), Transport(log)
    for number in range(100):
        outbox.send(a, b"%d" % number)
        assert len(log) == number + 1
        await an_iteration()
    assert outbox.flushes == 0


async def test_when_iterations_have_several_they_wait(log):
    outbox, a = Outbox(), Transport(log)
    waited = []
    for _ in range(40):
        before = len(log)
        for _ in range(2):
            outbox.send(a, b"x")
        waited.append(len(log) == before)
        await an_iteration()
        assert len(log) == before + 2
    assert all(waited[-10:])


async def test_after_some_iterations_of_one_they_wait_no_more(log, outbox):
    a, waited = Transport(log), []
    for number in range(20):
        outbox.send(a, b"%d" % number)
        waited.append(len(log) == number)
        await an_iteration()
        assert len(log) == number + 1
    assert waited[0]
    assert not any(waited[-5:])
