from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from tests.support.memory import growth_bytes

from kvroute.errors import InvalidRequest, ModelNotFound, NotFound
from kvroute.fleet.fleet import AdminOverrides, Fleet, FleetChange
from kvroute.fleet.worker import Ejection, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec

FACTS = WorkerFacts(models=frozenset({"m"}), capacity_tokens=1600, block_size=16, start_time=1.0)


def spec(worker_id: str, url: str = "", **more: object) -> WorkerSpec:
    return WorkerSpec(WorkerId(worker_id), url or f"http://{worker_id}:1", **more)  # type: ignore[arg-type]


def fleet_of(*ids: str) -> Fleet:
    """Healthy workers that serve "m"."""
    fleet = Fleet()
    fleet.apply("static", [spec(worker_id) for worker_id in ids])
    for worker in fleet.workers():
        fleet.update_facts(worker, FACTS)
        fleet.mark_healthy(worker, 0.0)
    return fleet


def changes_of(fleet: Fleet) -> list[tuple[FleetChange, str]]:
    """The changes that a listener receives from now on."""
    changes: list[tuple[FleetChange, str]] = []
    fleet.subscribe(lambda change, worker: changes.append((change, worker.id)))
    return changes


def ids(fleet: Fleet, model: str = "m") -> list[str]:
    return [worker.id for worker in fleet.view(model).workers]


# Membership


def test_a_new_worker_is_unknown_and_in_no_view() -> None:
    fleet = Fleet()
    changes = changes_of(fleet)

    fleet.apply("static", [spec("a", models=("m",))])

    assert fleet.get("a").state is HealthState.UNKNOWN
    assert ids(fleet) == []
    assert changes == [(FleetChange.JOINED, "a")]


def test_a_worker_that_no_source_lists_leaves_every_view_immediately() -> None:
    fleet = fleet_of("a", "b")
    removed = fleet.get("a")
    running = removed.load.reserve(0.0, prefill_s=1.0, tokens=10)
    changes = changes_of(fleet)

    fleet.apply("static", [spec("b")])

    assert ids(fleet) == ["b"]
    assert changes == [(FleetChange.LEFT, "a")]
    assert not removed.is_routable
    assert removed.load.in_flight == 1
    running.finish(1.0)
    assert removed.load.in_flight == 0


def test_applying_the_same_set_again_changes_nothing() -> None:
    fleet = fleet_of("a")
    changes, version, worker = changes_of(fleet), fleet.version, fleet.get("a")

    fleet.apply("static", [spec("a")])

    assert (changes, fleet.version, fleet.get("a")) == ([], version, worker)


def test_a_changed_url_makes_a_new_worker() -> None:
    fleet = fleet_of("a")
    old = fleet.get("a")
    changes = changes_of(fleet)

    fleet.apply("static", [spec("a", "http://elsewhere:1")])

    assert fleet.get("a") is not old
    assert fleet.get("a").state is HealthState.UNKNOWN
    assert changes == [(FleetChange.LEFT, "a"), (FleetChange.JOINED, "a")]


def test_other_changes_of_an_entry_keep_the_worker() -> None:
    fleet = Fleet()
    fleet.apply("static", [spec("a")])
    worker, changes = fleet.get("a"), changes_of(fleet)

    fleet.apply("static", [spec("a", models=("m",))])
    assert fleet.get("a") is worker
    assert worker.serves("m")
    assert changes == []

    fleet.apply("static", [spec("a", models=("m",), capacity_tokens=77)])
    assert worker.capacity_tokens == 77
    assert changes == [(FleetChange.CAPACITY, "a")]


def test_an_index_is_reused_only_after_listeners_have_forgotten_its_owner() -> None:
    fleet = fleet_of("a", "b")
    taken: dict[int, str] = {worker.index: worker.id for worker in fleet.workers()}

    def listener(change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.LEFT:
            del taken[worker.index]
        elif change is FleetChange.JOINED:
            assert worker.index not in taken
            taken[worker.index] = worker.id

    fleet.subscribe(listener)
    fleet.apply("static", [spec("b"), spec("c"), spec("d")])

    assert taken == {0: "c", 1: "b", 2: "d"}


def test_an_admin_adds_and_removes_workers() -> None:
    fleet = fleet_of("a")

    assert fleet.add(spec("b")).id == "b"
    fleet.remove("a")
    fleet.apply("static", [spec("a")])

    assert [worker.id for worker in fleet.workers()] == ["b"]
    fleet.add(spec("a"))
    assert [worker.id for worker in fleet.workers()] == ["a", "b"]


def test_a_url_cannot_be_added_twice() -> None:
    fleet = fleet_of("a")

    with pytest.raises(InvalidRequest, match="'a'") as caught:
        fleet.add(spec("b", fleet.get("a").spec.url))

    assert caught.value.param == "url"
    assert [worker.id for worker in fleet.workers()] == ["a"]


@pytest.mark.parametrize("action", ["get", "remove", "drain", "undrain"])
def test_an_unknown_worker_is_not_found(action: str) -> None:
    with pytest.raises(NotFound, match="'nobody'"):
        getattr(Fleet(), action)("nobody")


# Views


def test_a_view_holds_the_healthy_workers_of_its_model_by_id() -> None:
    fleet = fleet_of("c", "a", "b", "d")
    fleet.update_facts(fleet.get("b"), replace(FACTS, models=frozenset({"other"})))
    fleet.mark_unhealthy(fleet.get("d"), Ejection.PROBES, "dead")

    assert ids(fleet) == ["a", "c"]
    assert ids(fleet, "other") == ["b"]


def test_a_view_is_the_same_object_until_something_changes() -> None:
    fleet = fleet_of("a", "b")
    before = fleet.view("m")

    assert fleet.view("m") is before
    fleet.mark_unhealthy(fleet.get("a"), Ejection.PROBES, "dead")

    assert fleet.view("m") is not before
    assert fleet.view("m").version > before.version
    assert [worker.id for worker in before.workers] == ["a", "b"]


def test_a_capacity_change_leaves_views_alone() -> None:
    fleet = fleet_of("a")
    view, changes = fleet.view("m"), changes_of(fleet)

    fleet.update_facts(fleet.get("a"), replace(FACTS, capacity_tokens=3200))

    assert fleet.view("m") is view
    assert changes == [(FleetChange.CAPACITY, "a")]


def test_views_of_unknown_models_take_no_memory() -> None:
    fleet = fleet_of("a")

    assert growth_bytes(lambda number: fleet.view(f"made-up-{number}"), 1000) < 10_000
    assert fleet.view("made-up-0").workers == ()


# Facts


def test_new_models_are_routable_immediately_and_removed_ones_are_not() -> None:
    fleet = fleet_of("a")

    fleet.update_facts(fleet.get("a"), replace(FACTS, models=frozenset({"n"})))

    assert (ids(fleet, "m"), ids(fleet, "n")) == ([], ["a"])
    assert fleet.resolve("n") == "n"
    with pytest.raises(ModelNotFound):
        fleet.resolve("m")


def test_cards_that_only_look_new_change_nothing() -> None:
    fleet = fleet_of("a")
    fleet.update_facts(fleet.get("a"), replace(FACTS, model_cards=({"id": "m", "created": 1},)))
    version = fleet.version

    fleet.update_facts(fleet.get("a"), replace(FACTS, model_cards=({"id": "m", "created": 2},)))

    assert fleet.version == version
    assert fleet.models() == ({"id": "m", "created": 1},)


def test_a_restart_is_reported_before_the_changes_that_it_causes() -> None:
    fleet = fleet_of("a")
    changes = changes_of(fleet)

    fleet.update_facts(fleet.get("a"), replace(FACTS, capacity_tokens=3200, start_time=2.0), restarted=True)

    assert changes == [(FleetChange.RESTARTED, "a"), (FleetChange.CAPACITY, "a")]


def test_models_outlive_their_workers_health() -> None:
    fleet = fleet_of("a")

    fleet.mark_unhealthy(fleet.get("a"), Ejection.PROBES, "dead")

    assert fleet.resolve(None) == "m"
    assert [card["id"] for card in fleet.models()] == ["m"]
    assert fleet.view("m").workers == ()


def test_aliases_lead_to_models() -> None:
    fleet = Fleet({"gpt-4": "m"})

    assert fleet.resolve("gpt-4") == "m"
    assert fleet.catalog.names["gpt-4"] == "m"


def test_an_assumed_capacity_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.apply("static", [spec("a"), spec("b", capacity_tokens=1000)])

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for worker in fleet.workers():
                fleet.mark_healthy(worker, 0.0)
                fleet.mark_unhealthy(worker, Ejection.PROBES, "dead")

    assumed = [record.getMessage() for record in caplog.records if "500000 tokens" in record.getMessage()]
    assert len(assumed) == 1
    assert "worker a " in assumed[0]


# Health


def test_an_ejection_is_logged_with_its_cause_only_for_a_healthy_worker() -> None:
    fleet = fleet_of("a")
    fleet.apply("file", [spec("b")])
    changes = changes_of(fleet)

    fleet.mark_unhealthy(fleet.get("a"), Ejection.REFUSED, "connection refused")
    fleet.mark_unhealthy(fleet.get("b"), Ejection.REFUSED, "connection refused")
    fleet.mark_unhealthy(fleet.get("a"), Ejection.PROBES, "still dead")

    assert changes == [
        (FleetChange.STATE, "a"),
        (FleetChange.EJECTED, "a"),
        (FleetChange.STATE, "b"),
    ]
    assert fleet.get("a").ejection is Ejection.REFUSED
    assert fleet.get("b").ejection is None


def test_a_worker_that_is_back_ramps_up() -> None:
    fleet = fleet_of("a")
    worker = fleet.get("a")
    assert worker.share_at(0.0) == 1.0
    fleet.mark_unhealthy(worker, Ejection.PROBES, "dead")

    fleet.mark_healthy(worker, 100.0, ramp_start=0.1, ramp_s=10.0)

    assert (worker.ejection, worker.trouble) == (None, "")
    assert worker.share == 0.1
    fleet.refresh_ramp(worker, 104.0)
    assert worker.share == pytest.approx(0.46)
    assert worker.share_at(105.0) == pytest.approx(0.55)
    fleet.refresh_ramp(worker, 111.0)
    assert (worker.share, worker.ramp_until) == (1.0, None)


def test_news_of_a_worker_that_left_are_ignored_even_if_another_has_its_name() -> None:
    fleet = fleet_of("a")
    old = fleet.get("a")
    fleet.apply("static", [spec("a", "http://elsewhere:1")])
    changes = changes_of(fleet)

    fleet.mark_healthy(old, 0.0)
    fleet.mark_unhealthy(old, Ejection.PROBES, "dead")
    fleet.update_facts(old, FACTS, restarted=True)

    assert changes == []
    assert fleet.get("a").state is HealthState.UNKNOWN
    assert fleet.health(old) is HealthState.DRAINING


def test_states_are_counted() -> None:
    fleet = fleet_of("a", "b", "c", "d")
    fleet.apply("file", [spec("e")])
    fleet.drain("a")
    fleet.mark_unhealthy(fleet.get("b"), Ejection.PROBES, "dead")

    assert fleet.states() == {
        HealthState.UNKNOWN: 1,
        HealthState.HEALTHY: 2,
        HealthState.UNHEALTHY: 1,
        HealthState.ASLEEP: 0,
        HealthState.DRAINING: 1,
    }


def test_reasons_explain_why_the_gateway_is_not_ready() -> None:
    fleet = Fleet()
    assert fleet.reasons_not_ready() == ["No workers are known."]
    fleet.apply("static", [spec("a"), spec("b"), spec("c")])
    fleet.mark_unhealthy(fleet.get("b"), Ejection.REFUSED, "connection refused")
    fleet.mark_healthy(fleet.get("c"), 0.0)

    assert fleet.reasons_not_ready() == [
        "Worker a is unknown.",
        "Worker b is unhealthy: connection refused.",
        "Worker c is healthy, but has not reported its models.",
    ]
    fleet.update_facts(fleet.get("c"), FACTS)
    assert fleet.reasons_not_ready() == []


# Draining


def test_a_draining_worker_gets_no_new_request_and_shows_its_running_ones() -> None:
    fleet = fleet_of("a", "b")
    running = fleet.get("a").load.reserve(0.0, prefill_s=1.0, tokens=10)
    changes = changes_of(fleet)

    assert fleet.drain("a").in_flight == 1
    assert ids(fleet) == ["b"]
    running.finish(1.0)
    assert fleet.drain("a").is_done
    assert changes == [(FleetChange.STATE, "a")]


def test_undraining_returns_to_the_health_found_meanwhile() -> None:
    fleet = fleet_of("a", "b")
    for worker_id in ("a", "b"):
        fleet.drain(worker_id)
    fleet.mark_unhealthy(fleet.get("b"), Ejection.PROBES, "dead")
    assert fleet.get("b").state is HealthState.DRAINING
    assert fleet.health(fleet.get("b")) is HealthState.UNHEALTHY

    fleet.undrain("a")
    fleet.undrain("b")
    fleet.undrain("b")

    assert fleet.get("a").state is HealthState.HEALTHY
    assert fleet.get("b").state is HealthState.UNHEALTHY


def test_a_worker_that_left_while_draining_serves_when_it_returns() -> None:
    fleet = fleet_of("a")
    fleet.drain("a")

    fleet.apply("static", [])
    fleet.apply("static", [spec("a")])

    assert fleet.get("a").state is HealthState.UNKNOWN
    fleet.mark_healthy(fleet.get("a"), 0.0)
    assert fleet.get("a").state is HealthState.HEALTHY


def test_a_worker_drains_while_its_source_reports_draining() -> None:
    fleet = fleet_of("a", "b")
    changes = changes_of(fleet)

    fleet.apply("static", [spec("a", draining=True), spec("b")])
    assert (ids(fleet), fleet.get("a").state) == (["b"], HealthState.DRAINING)
    fleet.undrain("a")
    assert fleet.get("a").state is HealthState.DRAINING
    fleet.mark_unhealthy(fleet.get("a"), Ejection.REFUSED, "gone")
    fleet.apply("static", [spec("a"), spec("b")])

    assert fleet.get("a").state is HealthState.UNHEALTHY
    assert changes == [(FleetChange.STATE, "a"), (FleetChange.EJECTED, "a"), (FleetChange.STATE, "a")]


def test_an_admin_drain_continues_when_the_source_reports_serving() -> None:
    fleet = fleet_of("a")
    fleet.drain("a")

    fleet.apply("static", [spec("a", draining=True)])
    fleet.apply("static", [spec("a")])
    assert fleet.get("a").state is HealthState.DRAINING

    fleet.undrain("a")
    assert fleet.get("a").state is HealthState.HEALTHY


def test_a_worker_may_join_draining() -> None:
    fleet = Fleet()
    changes = changes_of(fleet)

    fleet.apply("static", [spec("a", draining=True)])
    fleet.mark_healthy(fleet.get("a"), 0.0)

    assert fleet.get("a").state is HealthState.DRAINING
    assert changes == [(FleetChange.JOINED, "a")]
    fleet.apply("static", [spec("a")])
    assert fleet.get("a").state is HealthState.HEALTHY


def test_admin_overrides_are_published_and_apply_in_another_fleet() -> None:
    there, here = fleet_of("a", "b"), fleet_of("a", "b")
    published: list[tuple[WorkerId, AdminOverrides]] = []
    there.subscribe_admin_overrides(lambda *change: published.append(change))

    there.drain("a")
    there.add(spec("c"))
    there.remove("b")
    here.apply_admin_overrides(published[-1][1])

    assert [(w.id, w.state) for w in here.workers()] == [(w.id, w.state) for w in there.workers()]
    assert here.get("a").state is HealthState.DRAINING

    there.undrain("a")
    here.apply_admin_overrides(published[-1][1])

    assert [worker for worker, _ in published] == ["a", "c", "b", "a"]
    assert here.get("a").state is there.get("a").state is not HealthState.DRAINING


def test_a_drain_elsewhere_of_a_worker_that_is_not_known_yet_waits_for_it() -> None:
    here = Fleet()
    changes_here = changes_of(here)
    here.apply_admin_overrides(AdminOverrides(drained=frozenset({WorkerId("a")})))

    here.apply("file", [spec("a")])

    assert here.get("a").state is HealthState.DRAINING
    assert changes_here == [(FleetChange.JOINED, "a")]


def test_applying_a_peers_overrides_publishes_nothing() -> None:
    here = fleet_of("a")
    published: list[tuple[WorkerId, AdminOverrides]] = []
    here.subscribe_admin_overrides(lambda *change: published.append(change))

    here.apply_admin_overrides(AdminOverrides(drained=frozenset({WorkerId("a")})))

    assert published == []


def test_a_worker_that_sleeps_is_in_no_view_and_drains_like_others() -> None:
    fleet = fleet_of("a", "b")
    seen: list[tuple[FleetChange, str]] = []
    fleet.subscribe(lambda change, worker: seen.append((change, worker.id)))
    a = fleet.get("a")

    fleet.set_asleep([a], "its engine is paused until /resume")
    assert a.state is HealthState.ASLEEP
    assert fleet.health(a) is HealthState.HEALTHY
    assert seen == [(FleetChange.STATE, "a")]
    assert fleet.causes() == "Worker a is asleep: its engine is paused until /resume."

    fleet.drain("a")
    assert a.state is HealthState.DRAINING
    fleet.undrain("a")
    assert a.state is HealthState.ASLEEP
    fleet.mark_unhealthy(a, Ejection.PROBES, "dead")
    assert a.state is HealthState.UNHEALTHY
    fleet.mark_healthy(a, 1.0)
    assert a.state is HealthState.ASLEEP
    fleet.set_asleep([a], "")
    assert a.state is HealthState.HEALTHY
