from __future__ import annotations

import json

import pytest
from tests.support.memory import growth_bytes

from kvroute.errors import AdapterNotIsolated, InvalidRequest
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerSpec
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.openai.rewriting import key_space
from kvroute.relay.key_spaces import KeySpaces


def facts(**adapters: str | None) -> WorkerFacts:
    """A base model, and adapters by the path that they were loaded from."""
    cards = [{"id": "base", "root": "/base", "parent": None}]
    cards += [{"id": name, "root": root, "parent": "base"} for name, root in adapters.items()]
    return WorkerFacts(
        models=frozenset({"base", *adapters}),
        adapters=tuple((name, "base") for name in adapters),
        model_cards=tuple(cards),
    )


def fleet_of(*workers: WorkerFacts) -> Fleet:
    fleet = Fleet()
    specs = [WorkerSpec(WorkerId(f"w{place}"), f"http://w{place}:1") for place in range(len(workers))]
    fleet.apply("static", specs)
    for worker, known in zip(fleet.workers(), workers, strict=True):
        fleet.update_facts(worker, known)
        fleet.mark_healthy(worker, 0.0)
    return fleet


def request(path: str = "/v1/completions", **more: object) -> InferenceRequest:
    return parse_request(ENDPOINTS[path], json.dumps({"model": "ada", "prompt": "p", **more}).encode())


def salts(isolation: KeySpaces, asked: InferenceRequest) -> list[str]:
    """What w0, w1, ... are sent with."""
    adapter = isolation.adapter("ada")
    assert adapter is not None
    body, others = isolation.bodies(asked, asked.body, adapter)
    bodies = [(others or {}).get(WorkerId(f"w{place}"), body) for place in range(3)]
    return [json.loads(each).get("cache_salt", "") for each in bodies]


def test_one_revision_everywhere_makes_one_body_and_predictions_use_its_salt() -> None:
    isolation = KeySpaces(fleet_of(facts(ada="/1"), facts(ada="/1")), adapters=True)
    asked = request(cache_salt="tenant")
    adapter = isolation.adapter("ada")
    assert adapter is not None

    body, others = isolation.bodies(asked, asked.body, adapter)

    assert others is None
    assert json.loads(body)["cache_salt"] == isolation.salt(asked, "ada") == key_space("tenant", "ada", "/1")
    assert isolation.predicts(WorkerId("w0"), "ada")


def test_each_worker_gets_the_key_space_of_the_revision_that_it_has() -> None:
    fleet = fleet_of(facts(ada="/1"), facts(ada="/2"), facts(ada="/2"))
    isolation = KeySpaces(fleet, adapters=True)

    old, new = key_space("", "ada", "/1"), key_space("", "ada", "/2")
    assert salts(isolation, request()) == [old, new, new]
    assert isolation.salt(request(), "ada") == new
    assert [isolation.predicts(worker.id, "ada") for worker in fleet.workers()] == [False, True, True]


def test_of_equally_many_revisions_every_gateway_predicts_by_the_same_one() -> None:
    one, other = facts(ada="/1"), facts(ada="/2")
    chosen = {
        KeySpaces(fleet_of(*workers), adapters=True).salt(request(), "ada")
        for workers in ((one, other), (other, one))
    }

    assert chosen == {key_space("", "ada", "/1")}


def test_a_worker_where_the_name_is_no_adapters_gets_the_body_as_it_came() -> None:
    merged = WorkerFacts(models=frozenset({"ada"}), model_cards=({"id": "ada", "root": "/m"},))
    isolation = KeySpaces(fleet_of(facts(ada="/1"), merged), adapters=True)

    assert salts(isolation, request(cache_salt="t"))[:2] == [key_space("t", "ada", "/1"), "t"]


def test_a_reloaded_adapter_is_noticed_and_an_unloaded_one_too() -> None:
    fleet = fleet_of(facts(ada="/1"))
    isolation = KeySpaces(fleet, adapters=True)
    before = isolation.salt(request(), "ada")
    (worker,) = fleet.workers()

    fleet.update_facts(worker, facts(ada="/2"))
    assert isolation.salt(request(), "ada") not in ("", before)

    fleet.update_facts(worker, facts())
    assert isolation.adapter("ada") is None
    assert not isolation.is_active
    assert isolation.salt(request(), "ada") == ""


def test_a_card_without_a_path_still_isolates() -> None:
    isolation = KeySpaces(fleet_of(facts(ada=None)), adapters=True)

    assert isolation.salt(request(), "ada") == key_space("", "ada", "")


def test_models_that_are_no_adapters_keep_their_own_salt() -> None:
    isolation = KeySpaces(fleet_of(facts(ada="/1")), adapters=True)

    assert isolation.is_active
    assert isolation.adapter("base") is None
    assert isolation.salt(request(cache_salt="t"), "base") == "t"


@pytest.mark.parametrize("fleet", [fleet_of(facts()), fleet_of()])
def test_without_adapters_nothing_is_active(fleet: Fleet) -> None:
    isolation = KeySpaces(fleet, adapters=True)

    assert not isolation.is_active
    assert isolation.adapter("ada") is None


def test_turned_off_there_are_no_adapters() -> None:
    isolation = KeySpaces(fleet_of(facts(ada="/1")), adapters=False)

    assert not isolation.is_active
    assert isolation.salt(request(cache_salt="t"), "ada") == "t"


def test_names_that_clients_make_up_take_no_memory() -> None:
    isolation = KeySpaces(fleet_of(facts(ada="/1")), adapters=True)

    assert growth_bytes(lambda number: isolation.adapter(f"made-up-{number}"), 1000) < 10_000
    assert isolation.adapter("made-up-0") is None


def test_counting_tokens_changes_nothing() -> None:
    isolation = KeySpaces(fleet_of(facts(ada="/1")), adapters=True)
    adapter = isolation.adapter("ada")
    assert adapter is not None
    asked = request("/tokenize", cache_salt="t")

    assert isolation.bodies(asked, asked.body, adapter) == (asked.body, None)
    assert isolation.salt(asked, "ada") == "t"


def test_a_body_that_cannot_be_changed_is_refused_not_sent() -> None:
    isolation = KeySpaces(fleet_of(facts(ada="/1")), adapters=True)
    adapter = isolation.adapter("ada")
    assert adapter is not None
    unread = parse_request(ENDPOINTS["/v1/completions"], b'{"model":"ada","prompt":"p","x":NaN}')
    with pytest.raises(AdapterNotIsolated):
        isolation.bodies(unread, unread.body, adapter)
    wrong = request(cache_salt=5)
    with pytest.raises(InvalidRequest):
        isolation.bodies(wrong, wrong.body, adapter)
    assert isolation.salt(wrong, "ada") == ""


def test_each_tenant_has_its_own_space_of_every_revision_and_of_the_base_model() -> None:
    merged = WorkerFacts(models=frozenset({"ada"}), model_cards=({"id": "ada", "root": "/m"},))
    isolation = KeySpaces(fleet_of(facts(ada="/1"), facts(ada="/2"), merged), adapters=True, tenants=True)
    asked, base = request(), request()
    asked.tenant = base.tenant = "t"

    assert salts(isolation, asked) == [
        key_space("", "ada", "/1", "t"),
        key_space("", "ada", "/2", "t"),
        key_space("", "", "", "t"),
    ]
    assert isolation.salt(asked, "ada") == key_space("", "ada", "/1", "t")
    body, others = isolation.bodies(base, base.body, None)
    assert others is None
    assert json.loads(body)["cache_salt"] == isolation.salt(base, "base") == key_space("", "", "", "t")


def test_without_a_tenant_no_request_is_sent_where_tenants_are_isolated() -> None:
    isolation = KeySpaces(fleet_of(facts()), adapters=True, tenants=True)

    assert isolation.is_active
    with pytest.raises(RuntimeError):
        isolation.bodies(request(), request().body, None)
