from __future__ import annotations

import pytest

from kvroute.errors import InvalidRequest, ModelNotFound, NoRoutableWorker
from kvroute.fleet.catalog import catalog_of
from kvroute.fleet.worker import HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec

BASE = {"id": "base", "object": "model", "created": 1, "owned_by": "vllm", "root": "/w", "parent": None}
ADAPTER = {"id": "sql", "object": "model", "created": 1, "owned_by": "vllm", "root": "/l", "parent": "base"}


def worker(
    worker_id: str,
    *cards: dict[str, object],
    state: HealthState = HealthState.HEALTHY,
    configured: tuple[str, ...] = (),
) -> Worker:
    facts = WorkerFacts(
        models=frozenset(str(card["id"]) for card in cards),
        adapters=tuple((str(card["id"]), str(card["parent"])) for card in cards if card.get("parent")),
        model_cards=cards,
    )
    return Worker(
        WorkerSpec(WorkerId(worker_id), f"http://{worker_id}", configured), state=state, facts=facts
    )


def test_models_adapters_and_aliases_resolve_to_the_workers_names() -> None:
    catalog = catalog_of([worker("a", BASE, ADAPTER)], {"gpt-4": "base", "sql-v2": "sql"})

    assert [catalog.resolve(name) for name in ("base", "sql", "gpt-4", "sql-v2")] == [
        "base",
        "sql",
        "base",
        "sql",
    ]


def test_an_alias_wins_over_a_model_of_its_name() -> None:
    catalog = catalog_of([worker("a", BASE, {"id": "other"})], {"base": "other"})

    assert catalog.resolve("base") == "other"


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        catalog_of([worker("a", BASE)], {}).resolve("nope")

    assert (caught.value.status, caught.value.error_code, caught.value.param) == (
        404,
        "model_not_found",
        "model",
    )


def test_a_model_of_an_unhealthy_worker_is_known() -> None:
    catalog = catalog_of([worker("a", BASE, state=HealthState.UNHEALTHY)], {})

    assert catalog.resolve("base") == "base"
    assert catalog.cards == (BASE,)


def test_a_configured_model_or_alias_target_is_known_before_any_worker_answers() -> None:
    catalog = catalog_of(
        [worker("a", BASE), worker("b", state=HealthState.UNHEALTHY, configured=("big",))], {"fast": "small"}
    )

    assert catalog.resolve("big") == "big"
    assert catalog.resolve("fast") == "small"


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param([], id="no workers"),
        pytest.param([worker("a", state=HealthState.UNHEALTHY)], id="none has told"),
        pytest.param([worker("a", BASE), worker("b", state=HealthState.UNKNOWN)], id="one not yet asked"),
    ],
)
def test_a_model_is_unavailable_rather_than_unknown_until_workers_list_theirs(workers: list[Worker]) -> None:
    with pytest.raises(NoRoutableWorker):
        catalog_of(workers, {}).resolve("perhaps")


def test_a_missing_model_means_the_only_one_apart_from_adapters() -> None:
    catalog = catalog_of([worker("a", BASE, ADAPTER), worker("b", BASE)], {"gpt-4": "base"})

    assert catalog.resolve(None) == "base"


def test_a_missing_model_means_the_first_name_where_one_model_has_several() -> None:
    second = {**BASE, "id": "second-name"}
    catalog = catalog_of([worker("a", BASE, second)], {})

    assert catalog.resolve(None) == "base"


def test_a_missing_model_with_several_to_choose_from_names_them() -> None:
    catalog = catalog_of([worker("a", BASE), worker("b", {"id": "big"}, state=HealthState.UNHEALTHY)], {})

    with pytest.raises(InvalidRequest, match=r"base, big\.") as caught:
        catalog.resolve(None)
    assert caught.value.param == "model"


def test_a_long_list_of_choices_is_cut() -> None:
    catalog = catalog_of([worker("a", configured=tuple(f"m{n:02}" for n in range(30)))], {})

    with pytest.raises(InvalidRequest, match=r"m19, \.\.\.\.$"):
        catalog.resolve(None)


def test_a_missing_model_is_unavailable_before_any_worker_lists_models() -> None:
    with pytest.raises(NoRoutableWorker):
        catalog_of([worker("a", state=HealthState.UNKNOWN)], {}).resolve(None)


def test_cards_merge_the_fleet_and_prefer_a_healthy_workers_word() -> None:
    stale = {**BASE, "max_model_len": 1}
    catalog = catalog_of(
        [
            worker("a", stale, state=HealthState.UNHEALTHY),
            worker("b", BASE, ADAPTER),
            worker("c", {"id": "big"}),
        ],
        {"gpt-4": "base", "dangling": "nowhere"},
    )

    assert catalog.cards == (BASE, ADAPTER, {"id": "big"}, {**BASE, "id": "gpt-4"})


def test_a_model_that_no_worker_described_gets_a_plain_card() -> None:
    catalog = catalog_of([worker("a", configured=("m",))], {}, created=123)

    assert catalog.cards == (
        {"id": "m", "object": "model", "created": 123, "owned_by": "kvroute", "root": "m", "parent": None},
    )


def card(name: str, root: str | None = "/opt/ml/model", parent: str | None = None) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 1, "root": root, "parent": parent}


CANONICAL = {
    "names of one worker": ([["a", "b", "c"]], {"b": "a", "c": "a"}),
    "the first of the list, whatever the alphabet": ([["z", "y"]], {"y": "z"}),
    "the name that most workers have": ([["a", "b"], ["b"]], {"a": "b"}),
    "workers that share a name": ([["a", "b"], ["b", "c"]], {"a": "b", "c": "b"}),
    "equal roots without a shared name": ([["a"], ["b"]], {}),
    "two models with equal roots": ([["a", "a2"], ["b", "b2"]], {"a2": "a", "b2": "b"}),
}


@pytest.mark.parametrize(("lists", "expected"), CANONICAL.values(), ids=CANONICAL)
def test_the_names_of_one_model_have_one_canonical_name(
    lists: list[list[str]], expected: dict[str, str]
) -> None:
    workers = [worker(str(place), *map(card, names)) for place, names in enumerate(lists)]

    for order in (workers, workers[::-1]):
        catalog = catalog_of(order, {})

        assert catalog.canonical == expected
        assert set(catalog.bases) == {name for names in lists for name in names} - set(expected)


def test_a_common_name_of_models_with_different_roots_joins_none_of_them() -> None:
    one = worker("a", card("llama", "/llama"), card("default", "/llama"))
    two = worker("b", card("qwen", "/qwen"), card("default", "/qwen"), card("qwen-3", "/qwen"))

    assert catalog_of([one, two], {}).canonical == {"qwen-3": "qwen"}


def test_one_model_may_have_different_roots_on_different_machines() -> None:
    one = worker("a", card("llama", "/llama"), card("default", "/llama"))
    two = worker("b", card("llama", "org/llama"), card("default", "org/llama"))

    assert catalog_of([one, two], {}).canonical == {"default": "llama"}


def test_a_name_with_options_of_its_own_is_the_canonical_one() -> None:
    workers = [worker("a", card("llama"), card("default"))]

    assert catalog_of(workers, {}, configured_names={"default"}).canonical == {"llama": "default"}


def test_adapters_and_cards_without_a_root_are_models_of_their_own() -> None:
    cards = (card("base"), card("sql", parent="base"), card("x", None), card("y", None))

    assert catalog_of([worker("a", *cards)], {}).canonical == {}
