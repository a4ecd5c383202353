from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvroute.fleet.options import FleetOptions, WorkerEntry
from kvroute.fleet.worker import WorkerSpec


@pytest.mark.parametrize(
    ("url", "base", "worker_id"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://Host:8000/", "http://host:8000", "host:8000"),
        ("https://gpu/", "https://gpu", "gpu"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_a_bare_url_is_a_worker_named_after_its_place(url: str, base: str, worker_id: str) -> None:
    options = FleetOptions.model_validate({"workers": [url]})

    spec = options.workers[0].spec()

    assert (spec.url, spec.id) == (base, worker_id)


def test_a_mapping_sets_the_other_options() -> None:
    entry = WorkerEntry.model_validate(
        {"id": "gpu-1", "url": "http://h:1", "models": ["m"], "capacity_tokens": 1000}
    )

    assert entry.spec() == WorkerSpec("gpu-1", "http://h:1", ("m",), 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("localhost:8000", "http://host:port"),
        ("ftp://h", "http://host:port"),
        ("http://", "http://host:port"),
        ("http://user:secret@h", "plain base URL"),
        ("http://h?x=1", "plain base URL"),
        ("http://h:8000/v1/", "leave out /v1"),
        ("http://h/a b", "plain path"),
        ("http://h/../below", "plain path"),
        ("http://h/a//b", "plain path"),
        ("http://h/%2e", "plain path"),
        ("http://h/below/v1", "leave out /v1"),
        ("http://h:99999", "Port out of range"),
        ("http://[::1", "IPv6"),
    ],
)
def test_a_url_that_is_no_base_url_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        WorkerEntry(url=url)


@pytest.mark.parametrize("worker_id", ["", "a b", "a/b", "x" * 129, "ä", "a\n"])
def test_an_id_unfit_for_a_header_is_refused(worker_id: str) -> None:
    with pytest.raises(ValidationError, match="characters"):
        WorkerEntry(url="http://h", id=worker_id)


@pytest.mark.parametrize(
    ("workers", "complaint"),
    [
        (["http://a:1", "http://a:1/"], "id 'a:1'"),
        ([{"id": "x", "url": "http://a"}, {"id": "x", "url": "http://b"}], "id 'x'"),
        ([{"id": "x", "url": "http://a"}, {"id": "y", "url": "http://a"}], "URL 'http://a'"),
    ],
)
def test_two_workers_of_one_name_or_place_are_refused(workers: list[object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        FleetOptions.model_validate({"workers": workers})


def test_an_environment_variable_holds_a_comma_separated_list() -> None:
    options = FleetOptions.model_validate({"workers": "http://a:1, http://b:2,"})

    assert [entry.url for entry in options.workers] == ["http://a:1", "http://b:2"]


def test_aliases_of_aliases_are_refused() -> None:
    with pytest.raises(ValidationError, match="another alias"):
        FleetOptions(aliases={"a": "b", "b": "c"})


def test_the_workers_key_never_shows() -> None:
    options = FleetOptions.model_validate({"worker_api_key": "hunter2"})

    assert "hunter2" not in repr(options)
    assert "hunter2" not in options.model_dump_json()


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="interval_sec"):
        FleetOptions.model_validate({"health": {"interval_sec": 1}})
