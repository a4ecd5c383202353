from __future__ import annotations

import logging

import pytest

from kvroute.fleet.fleet import ADMIN, DesiredWorkers
from kvroute.fleet.worker import WorkerId, WorkerSpec


def spec(worker_id: str, url: str = "") -> WorkerSpec:
    return WorkerSpec(WorkerId(worker_id), url or f"http://{worker_id}:1")


def test_each_source_replaces_only_its_own_entries() -> None:
    wanted = DesiredWorkers()
    wanted.replace("static", [spec("a")])
    wanted.replace("file", [spec("b"), spec("c")])

    wanted.replace("file", [spec("c")])

    assert set(wanted.merged()) == {"a", "c"}


def test_a_worker_stays_while_any_source_wants_it() -> None:
    wanted = DesiredWorkers()
    wanted.replace("static", [spec("a")])
    wanted.replace("file", [spec("a")])

    wanted.replace("static", [])

    assert set(wanted.merged()) == {"a"}


def test_the_first_source_with_an_id_wins_and_an_admin_entry_wins_over_all() -> None:
    wanted = DesiredWorkers()
    wanted.replace("static", [spec("a", "http://one:1")])
    wanted.replace("file", [spec("a", "http://two:1")])

    assert wanted.merged()[WorkerId("a")].url == "http://one:1"
    wanted.add(spec("a", "http://hand:1"))
    assert wanted.merged()[WorkerId("a")].url == "http://hand:1"


def test_a_second_id_for_one_url_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    wanted = DesiredWorkers()
    wanted.replace("static", [spec("a", "http://same:1")])
    wanted.replace("file", [spec("b", "http://same:1")])

    with caplog.at_level(logging.WARNING):
        assert set(wanted.merged()) == {"a"}
        assert set(wanted.merged()) == {"a"}

    assert len(caplog.records) == 1
    wanted.replace("static", [])
    assert set(wanted.merged()) == {"b"}


def test_a_second_url_for_one_id_is_logged_once_unless_an_operator_set_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = DesiredWorkers()
    wanted.replace("static", [spec("a", "http://one:1"), spec("b")])
    wanted.replace("file", [spec("a", "http://two:1"), spec("b")])

    wanted.merged()
    wanted.merged()

    assert caplog.messages == ["worker a (http://two:1) of file is ignored: http://one:1 has the same id"]
    wanted.add(spec("a", "http://hand:1"))
    wanted.replace("static", [])
    wanted.merged()
    assert len(caplog.messages) == 1


def test_a_worker_removed_by_an_admin_stays_removed_while_its_source_lists_it() -> None:
    wanted = DesiredWorkers()
    wanted.replace("file", [spec("a"), spec("b")])
    wanted.remove(WorkerId("a"))

    wanted.replace("file", [spec("a"), spec("b"), spec("c")])
    assert set(wanted.merged()) == {"b", "c"}

    wanted.replace("file", [spec("b")])
    wanted.replace("file", [spec("a"), spec("b")])
    assert set(wanted.merged()) == {"a", "b"}


def test_an_admin_addition_undoes_an_admin_removal() -> None:
    wanted = DesiredWorkers()
    wanted.replace("file", [spec("a")])
    wanted.remove(WorkerId("a"))

    wanted.add(spec("a"))

    assert set(wanted.merged()) == {"a"}


def test_a_worker_that_only_an_admin_added_is_forgotten_when_removed() -> None:
    wanted = DesiredWorkers()
    wanted.add(spec("a"))
    wanted.remove(WorkerId("a"))

    wanted.replace("file", [spec("a")])

    assert set(wanted.merged()) == {"a"}
    assert ADMIN == "admin"


def test_a_peers_admin_overrides_apply_here() -> None:
    there, here = DesiredWorkers(), DesiredWorkers()
    for wanted in (there, here):
        wanted.replace("file", [spec("a"), spec("b")])
    there.remove(WorkerId("a"))
    there.add(spec("c"))

    here.apply_overrides(there.overrides(frozenset()))
    assert here.merged() == there.merged()

    there.add(spec("a"))
    there.remove(WorkerId("c"))
    here.apply_overrides(there.overrides(frozenset()))
    assert set(here.merged()) == set(there.merged()) == {"a", "b"}


def test_a_worker_removed_at_a_peer_stays_out_when_its_source_is_read_later() -> None:
    there, here = DesiredWorkers(), DesiredWorkers()
    there.replace("dns", [spec("b")])
    there.replace("file", [spec("a")])
    there.remove(WorkerId("a"))

    here.apply_overrides(there.overrides(frozenset()))
    here.replace("dns", [spec("b")])
    here.replace("file", [spec("a")])

    assert set(here.merged()) == {"b"}
