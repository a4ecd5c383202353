"""A daemon tells which entries came and went, so that a gateway can follow what it holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.tierd.conftest import Client, Node, StartNode

from kvroute.tierd.pool import PAGE_BYTES, ObjectName
from kvroute.tierd.store import ChangeList

PAGE = bytes(PAGE_BYTES)


async def changes(client: Client, after: Any = None, *, wait_ms: int = 0, bucket: str = "b") -> Any:
    """The answer; `after` is an earlier answer."""
    position = {"incarnation": after["incarnation"], "after": after["number"]} if after else {}
    answer = await client.http.get(f"/v1/changes/{bucket}", params={**position, "timeout_ms": wait_ms})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_first_call_lists_the_entries_and_later_ones_what_changed(start_node: StartNode) -> None:
    client = (await start_node(pages=2)).client
    await client.put("m@1@0@-1a@bfloat16", PAGE)
    first = await changes(client)
    await client.put("two", PAGE)
    await client.put("three", PAGE)  # evicts the oldest one

    second = await changes(client, first)

    assert (first["whole"], first["stored"], first["removed"]) == (True, ["m@1@0@-1a@bfloat16"], [])
    assert (second["whole"], sorted(second["stored"])) == (False, ["three", "two"])
    assert second["removed"] == ["m@1@0@-1a@bfloat16"]
    third = await changes(client, second)
    assert (third["stored"], third["removed"], third["number"]) == ([], [], second["number"])


async def test_an_entry_that_went_and_came_again_is_stored(start_node: StartNode) -> None:
    client = (await start_node(pages=1)).client
    first = await changes(client)
    for key in ("one", "two", "one"):
        await client.put(key, PAGE)

    found = await changes(client, first)

    assert (found["stored"], found["removed"]) == (["one"], ["two"])


async def test_a_call_is_held_until_something_changes(client: Client) -> None:
    first = await changes(client)
    held = asyncio.create_task(changes(client, first, wait_ms=20_000))
    await client.health()  # the held call was sent before this one
    assert not held.done()

    await client.put("k", PAGE)

    assert (await held)["stored"] == ["k"]


async def test_a_client_that_leaves_a_held_call_leaves_nothing_behind(node: Node) -> None:
    first = await changes(node.client)
    held = asyncio.create_task(changes(node.client, first, wait_ms=20_000))
    waiting = node.running.store.changes._waiting
    async with asyncio.timeout(10):
        while not waiting:
            await asyncio.sleep(0)

        held.cancel()

        while waiting:
            await asyncio.sleep(0)


async def test_other_buckets_and_names_that_are_no_text_are_left_out(client: Client) -> None:
    await client.put("k", PAGE)
    await client.put("other", PAGE, bucket="c")
    await client.put("%ff", PAGE)

    assert (await changes(client))["stored"] == ["k"]
    assert (await changes(client, bucket="c"))["stored"] == ["other"]


async def test_a_position_of_another_incarnation_gets_everything(client: Client) -> None:
    await client.put("k", PAGE)

    found = await changes(client, {"incarnation": "earlier", "number": 1}, wait_ms=20_000)

    assert (found["whole"], found["stored"]) == (True, ["k"])


async def test_an_entry_on_the_disk_is_there(start_node: StartNode, tmp_path: Path) -> None:
    node = await start_node(pages=2, disk_dir=tmp_path, disk_gb=0.01)
    first = await changes(node.client)
    for number in range(6):
        assert await node.client.put(str(number), PAGE) == 200

    later, anew = await changes(node.client, first), await changes(node.client)

    assert len(node.running.store.pool.entries) == 2
    assert sorted(later["stored"]) == sorted(anew["stored"]) == list("012345")
    assert later["removed"] == []


async def test_an_entry_that_the_disk_evicts_is_gone(start_node: StartNode, tmp_path: Path) -> None:
    node = await start_node(pages=1, disk_dir=tmp_path, disk_gb=2 * (PAGE_BYTES + 64) / 2**30)
    first = await changes(node.client)
    for number in range(6):
        await node.client.put(str(number), PAGE)

    found = await changes(node.client, first)

    there = [key for key in "012345" if await node.client.get(key, wait_ms=10_000) is not None]
    assert set(found["stored"]) >= set(there)
    assert len(found["removed"]) >= 3


async def test_the_peers_key_is_needed(start_node: StartNode) -> None:
    client = (await start_node(peers={"key": "k1"})).client

    assert (await client.http.get("/v1/changes/b")).status_code == 401
    right = await client.http.get("/v1/changes/b", headers={"authorization": "Bearer k1"})
    assert right.status_code == 200


async def test_wrong_positions_are_refused(client: Client) -> None:
    for query, param in (("after=-1", "after"), ("after=x", "after"), ("timeout_ms=-5", "timeout_ms")):
        answer = await client.http.get(f"/v1/changes/b?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await client.http.put("/v1/changes/b", content=b"x")).status_code == 405


def test_a_position_before_the_oldest_change_is_unknown() -> None:
    changes = ChangeList(kept=3)
    for number in range(5):
        changes.note(ObjectName(b"b", b"%d" % number))

    assert changes.since(1) is None
    assert changes.since(6) is None
    assert [each.key for each in changes.since(3) or ()] == [b"3", b"4"]
    assert list(changes.since(5) or ()) == []
