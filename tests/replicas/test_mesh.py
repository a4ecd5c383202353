"""Meshes of one loop over real Unix sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.support.waiting import until

from kvroute.replicas.mesh import FrameReader, Mesh, encode_frame, make_socket_folder
from kvroute.replicas.messages import Finished, FirstToken, Hello, InSync, Leaving


class RecordingMember:
    """A `PeerListener` that records its messages and links."""

    def __init__(self, *greeting, is_synced: bool = True) -> None:
        self.first_messages = greeting
        self.is_synced = is_synced
        self.received: list = []
        self.links: list = []

    def greeting(self, number):
        return self.first_messages

    def on_linked(self, number, *, is_synced):
        self._note(self.links, ("linked", number, is_synced))

    def on_message(self, number, message):
        self._note(self.received, (number, message))

    def on_peer_gone(self, number):
        self._note(self.links, ("lost", number))

    def _note(self, to, what):
        to.append(what)


@asynccontextmanager
async def started(mesh, member):
    await mesh.start(member)
    try:
        yield mesh
    finally:
        await mesh.aclose()


@pytest.fixture
async def three(tmp_path):
    meshes = [Mesh(number, 3, tmp_path) for number in range(3)]
    members = [RecordingMember(FirstToken(number)) for number in range(3)]
    async with AsyncExitStack() as stack:
        for mesh, member in zip(meshes, members, strict=True):
            await stack.enter_async_context(started(mesh, member))
        async with asyncio.timeout(20):
            for mesh in meshes:
                await mesh.all_linked()
        yield meshes, members


async def test_each_process_receives_the_messages_of_all_others_after_their_greeting(three):
    meshes, members = three
    for number, mesh in enumerate(meshes):
        for place in range(3):
            mesh.publish(Finished(10 * number + place))

    for number, member in enumerate(members):
        await until(lambda member=member: len(member.received) == 8)
        for other in {0, 1, 2} - {number}:
            received = [message for sender, message in member.received if sender == other]
            assert received == [FirstToken(other), *(Finished(10 * other + place) for place in range(3))]
    assert meshes[0].linked_peers == [1, 2]


async def test_messages_published_before_a_link_are_not_sent_on_it(tmp_path):
    early, late = RecordingMember(), RecordingMember(is_synced=False)
    async with started(Mesh(0, 2, tmp_path), early) as mesh:
        mesh.publish(Finished(1))
        early.first_messages = (FirstToken(5),)
        async with started(Mesh(1, 2, tmp_path), late):
            await until(lambda: early.links)
            mesh.publish(Finished(2))

            await until(lambda: len(late.received) == 2)
            assert late.received == [(0, FirstToken(5)), (0, Finished(2))]
            assert early.links == [("linked", 1, False)]
            assert late.links == [("linked", 0, True)]


async def test_a_process_that_returns_is_linked_again(tmp_path):
    stays = RecordingMember()
    async with started(Mesh(1, 2, tmp_path), stays) as mesh:
        for _ in range(2):
            async with started(Mesh(0, 2, tmp_path), RecordingMember()):
                await until(lambda: stays.links and stays.links[-1][0] == "linked")
            await until(lambda: stays.links[-1][0] == "lost")

        assert [kind for kind, *_ in stays.links] == ["linked", "lost"] * 2
        assert mesh.counts.breaks == 0, "it announced its end"


@asynccontextmanager
async def raw_peer(mesh, number):
    """A connection to `mesh` on which the test is process `number`."""
    reader, writer = await asyncio.open_unix_connection(str(mesh.folder / f"{mesh.number}.sock"))
    writer.write(encode_frame([Hello(number, is_synced=True)]))
    try:
        async with asyncio.timeout(20):
            await mesh.all_linked()
            yield reader, writer
    finally:
        writer.transport.abort()


async def test_a_process_that_ends_lets_the_others_end_its_links(tmp_path):
    async with (
        started(Mesh(0, 2, tmp_path), RecordingMember()) as mesh,
        raw_peer(mesh, 1) as (reader, writer),
    ):
        ending = asyncio.create_task(mesh.aclose())
        frames, messages = FrameReader(), []
        while Leaving() not in messages:
            messages += frames.feed(await reader.read(1024))
        writer.write(encode_frame([Finished(1)]))  # crosses `Leaving`; a closed socket would refuse it
        await writer.drain()
        writer.close()

        assert await reader.read() == b""
        await ending


async def test_a_process_that_reads_nothing_cannot_stop_another_from_ending(tmp_path):
    async with started(Mesh(0, 2, tmp_path), RecordingMember()) as mesh, raw_peer(mesh, 1) as (reader, _):
        await mesh.aclose()
        await reader.read()  # it ends


async def test_the_link_to_a_process_that_leaves_is_ended(tmp_path):
    member = RecordingMember()
    async with started(Mesh(0, 2, tmp_path), member) as mesh, raw_peer(mesh, 1) as (reader, writer):
        writer.write(encode_frame([Leaving()]))
        await reader.read()

        await until(lambda: member.links[-1] == ("lost", 1))
        assert mesh.counts.breaks == 0


async def test_a_broken_link_is_counted_and_logged(three, caplog):
    meshes, members = three

    # No public method breaks a link: a Unix socket breaks only when a process dies.
    next(iter(meshes[2]._open)).close()
    await until(lambda: ("lost", 0) in members[2].links or ("lost", 1) in members[2].links)

    assert meshes[2].counts.breaks == 1
    assert "broke" in caplog.text
    async with asyncio.timeout(20):
        await meshes[2].all_linked()


async def test_a_request_is_answered_by_all_processes(three):
    meshes, _ = three
    for number, mesh in enumerate(meshes):

        async def answer(argument, number=number):
            return b"%d answers %b" % (number, argument)

        mesh.handle("name", answer)

    assert await meshes[1].request_all("name", b"hi", 20) == {0: b"0 answers hi", 2: b"2 answers hi"}


async def test_an_answer_that_is_late_is_left_out(three):
    meshes, _ = three

    async def answer(argument):
        return argument

    async def never(argument):
        await asyncio.Event().wait()
        return argument

    meshes[0].handle("name", answer)
    meshes[2].handle("name", never)

    assert await meshes[1].request_all("name", b"x", 0.2) == {0: b"x"}


async def test_a_process_that_fails_to_answer_is_left_out(three, caplog):
    meshes, _ = three

    async def fail(argument):
        raise ValueError("a defect")

    meshes[0].handle("name", fail)

    assert await meshes[1].request_all("name", b"", 0.2) == {}
    assert "a defect" in caplog.text


async def test_a_message_to_one_process_reaches_only_that_process(three):
    meshes, members = three

    assert meshes[0].send(2, InSync())
    await until(lambda: (0, InSync()) in members[2].received)

    assert (0, InSync()) not in members[1].received
    assert not meshes[0].send(7, InSync())


async def test_an_unknown_client_is_disconnected(three, tmp_path, caplog):
    meshes, _ = three
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "0.sock"))

    writer.write(b"\x03\0\0\0abc")
    async with asyncio.timeout(20):
        await reader.read()  # until the mesh closes the connection
    writer.close()

    assert meshes[0].linked_peers == [1, 2]
    assert "is invalid" in caplog.text


def test_only_the_user_can_open_the_folder(tmp_path):
    assert make_socket_folder(tmp_path).stat().st_mode & 0o777 == 0o700
