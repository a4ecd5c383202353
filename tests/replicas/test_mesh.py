"""Meshes of one loop over real Unix sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvroute.replicas.mesh import Mesh, folder_of_links
from kvroute.replicas.messages import Finished, FirstToken, InSync


class Listening:
    """A member that remembers."""

    def __init__(self, *greeting, is_level: bool = True) -> None:
        self.said = greeting
        self.is_level = is_level
        self.told: list = []
        self.links: list = []
        self._changed = asyncio.Event()

    def greeting(self, number):
        return self.said

    def linked(self, number, *, is_level):
        self._note(self.links, ("linked", number, is_level))

    def heard(self, number, message):
        self._note(self.told, (number, message))

    def lost(self, number):
        self._note(self.links, ("lost", number))

    def _note(self, to, what):
        to.append(what)
        self._changed.set()

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


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
    members = [Listening(FirstToken(number)) for number in range(3)]
    async with AsyncExitStack() as stack:
        for mesh, member in zip(meshes, members, strict=True):
            await stack.enter_async_context(started(mesh, member))
        async with asyncio.timeout(20):
            for mesh in meshes:
                await mesh.all_linked()
        yield meshes, members


async def test_everybody_hears_what_everybody_says_after_its_greeting(three):
    meshes, members = three
    for number, mesh in enumerate(meshes):
        for place in range(3):
            mesh.publish(Finished(10 * number + place))

    for number, member in enumerate(members):
        await member.until(lambda member=member: len(member.told) == 8)
        for other in {0, 1, 2} - {number}:
            said = [message for speaker, message in member.told if speaker == other]
            assert said == [FirstToken(other), *(Finished(10 * other + place) for place in range(3))]
    assert meshes[0].peers == [1, 2]


async def test_what_was_published_before_a_link_is_not_said_again(tmp_path):
    early, late = Listening(), Listening(is_level=False)
    async with started(Mesh(0, 2, tmp_path), early) as mesh:
        mesh.publish(Finished(1))
        early.said = (FirstToken(5),)
        async with started(Mesh(1, 2, tmp_path), late):
            await early.until(lambda: early.links)
            mesh.publish(Finished(2))

            await late.until(lambda: len(late.told) == 2)
            assert late.told == [(0, FirstToken(5)), (0, Finished(2))]
            assert early.links == [("linked", 1, False)]
            assert late.links == [("linked", 0, True)]


async def test_who_comes_back_is_linked_again(tmp_path):
    stays = Listening()
    async with started(Mesh(1, 2, tmp_path), stays) as mesh:
        for _ in range(2):
            async with started(Mesh(0, 2, tmp_path), Listening()):
                await stays.until(lambda: stays.links and stays.links[-1][0] == "linked")
            await stays.until(lambda: stays.links[-1][0] == "lost")

        assert [kind for kind, *_ in stays.links] == ["linked", "lost"] * 2
        assert mesh.counts.breaks == 0, "it said that it was leaving"


async def test_a_break_is_counted_and_said(three, caplog):
    meshes, members = three

    next(iter(meshes[2]._open)).close()
    await members[2].until(lambda: ("lost", 0) in members[2].links or ("lost", 1) in members[2].links)

    assert meshes[2].counts.breaks == 1
    assert "broke" in caplog.text
    async with asyncio.timeout(20):
        await meshes[2].all_linked()


async def test_questions_are_answered_by_all(three):
    meshes, _ = three
    for number, mesh in enumerate(meshes):

        async def answer(how, number=number):
            return b"%d says %b" % (number, how)

        mesh.answers("name", answer)

    assert await meshes[1].ask("name", b"hi", 20) == {0: b"0 says hi", 2: b"2 says hi"}


async def test_who_does_not_answer_in_time_is_left_out(three):
    meshes, _ = three

    async def answer(how):
        return how

    async def never(how):
        await asyncio.Event().wait()
        return how

    meshes[0].answers("name", answer)
    meshes[2].answers("name", never)

    assert await meshes[1].ask("name", b"x", 0.2) == {0: b"x"}


async def test_who_fails_or_does_not_know_the_question_is_left_out(three, caplog):
    meshes, _ = three

    async def fail(how):
        raise ValueError("a defect")

    meshes[0].answers("name", fail)

    assert await meshes[1].ask("name", b"", 0.2) == {}
    assert "a defect" in caplog.text


async def test_a_message_for_one_goes_to_that_one(three):
    meshes, members = three

    assert meshes[0].send(2, InSync())
    await members[2].until(lambda: (0, InSync()) in members[2].told)

    assert (0, InSync()) not in members[1].told
    assert not meshes[0].send(7, InSync())


async def test_a_stranger_is_not_listened_to(three, tmp_path, caplog):
    meshes, _ = three
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "0.sock"))

    writer.write(b"\x03\0\0\0abc")
    async with asyncio.timeout(20):
        await reader.read()  # until it hangs up
    writer.close()

    assert meshes[0].peers == [1, 2]
    assert "not understood" in caplog.text


def test_the_folder_is_the_users_alone(tmp_path):
    assert folder_of_links(tmp_path).stat().st_mode & 0o777 == 0o700
