"""What is rendered for each pair of releases is known to these releases: options, variables, connector.

`scripts/record_options.py` recorded the lists. The wheels' own parsers run in tests/engine/test_versions.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.support.pairs import plans_of, server_commands

from kvroute.config.config import Config
from kvroute.deploy.render.config import gateway_config
from kvroute.deploy.render.worker_args import container_environment, worker_argv
from kvroute.deploy.spec.versions import LMCACHE, PAIRS, Pair

OPTIONS = Path(__file__).parents[2] / "data" / "options"
# Variables that are neither vLLM's nor LMCache's.
OTHER_VARIABLES = {"PYTHONHASHSEED", "DO_NOT_TRACK", "HF_HUB_OFFLINE"}
pairs = pytest.mark.parametrize("pair", PAIRS, ids=str)


def record(package: str, release: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OPTIONS / f"{package}-{release}.json").read_text())
    return found


class StrictParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


def server_parser(release: str) -> StrictParser:
    """The recorded parser of `lmcache server`, built again."""
    parser = StrictParser(add_help=False, allow_abbrev=False)
    for row in record("lmcache", release)["server"]:
        details = {name: row[name] for name in ("action", "nargs", "choices", "required") if name in row}
        if "type" in row:
            details["type"] = {"int": int, "float": float}[row["type"]]
        parser.add_argument(*row["flags"], **details)
    return parser


@pairs
def test_every_rendered_server_command_parses_in_its_release(pair: Pair) -> None:
    parser, commands = server_parser(pair.lmcache.name), server_commands(pair)
    for argv in commands:
        assert argv[:2] == ("lmcache", "server")
        parser.parse_args(argv[2:])

    assert bool(commands) == pair.lmcache.has_server


@pairs
def test_every_rendered_engine_knows_its_options_connector_and_variables(pair: Pair) -> None:
    vllm, lmcache = record("vllm", pair.vllm.name), record("lmcache", pair.lmcache.name)
    own_connector = not pair.vllm.loads_lmcache_connector
    mp_keys = vllm["lmcache_connector"] if own_connector else lmcache["connector"]
    for endpoint, site in plans_of(pair):
        worker = site.workers[0]
        argv = worker_argv(endpoint, worker, site)
        assert argv[:2] == ("vllm", "serve")
        values = dict(options_in(argv[3:], vllm["options"]))
        assert set(json.loads(values.get("--kv-events-config", "{}"))) <= set(vllm["kv_events_config"])
        transfer = json.loads(values.get("--kv-transfer-config", "{}"))
        assert set(transfer) <= set(vllm["kv_transfer_config"])
        assert transfer.get("kv_connector", "LMCacheConnectorV1") in vllm["connectors"]
        if endpoint.cache is not None and not endpoint.cache.classic:
            assert set(transfer["kv_connector_extra_config"]) <= set(mp_keys)
        for name in container_environment(endpoint, worker, site):
            if name.startswith("LMCACHE_"):
                assert name.removeprefix("LMCACHE_").lower() in lmcache["settings"]
            else:
                assert name in OTHER_VARIABLES or name in vllm["environment"], name


@pairs
def test_the_gateway_accepts_its_configuration_for_every_pair(pair: Pair) -> None:
    seen: dict[bool, set[str]] = {}
    for endpoint, site in plans_of(pair):
        config = Config.model_validate(gateway_config(endpoint, site))
        if endpoint.follows_caches and endpoint.cache is not None:
            lmcache, classic = config.lmcache, endpoint.cache.classic
            enabled = {"l1"} if lmcache.controller.enabled or lmcache.coordinator.enabled else set()
            enabled |= {"l2"} if lmcache.coordinator.enabled else set()
            seen[classic] = seen.get(classic, set()) | enabled | {"gpu"}

    for classic, tiers in seen.items():
        assert tiers == set(pair.tiers(classic=classic))


def options_in(argv: tuple[str, ...], options: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The options of a command line with their values. Fails at an option that the release does not have."""
    words = iter(argv)
    for word in words:
        assert word in options, word
        yield word, next(words) if options[word] == "value" else ""


@pairs
def test_the_table_says_of_vllm_what_its_options_say(pair: Pair) -> None:
    vllm = record("vllm", pair.vllm.name)

    assert pair.vllm.has_shutdown_timeout == ("--shutdown-timeout" in vllm["options"])
    assert set(pair.vllm.prefill_decode) <= set(vllm["connectors"])
    ways = {"NixlConnector", "NixlPushConnector", "MooncakeConnector", "P2pNcclConnector"}
    assert set(pair.vllm.prefill_decode) == ways & set(vllm["connectors"])


@pytest.mark.parametrize("release", LMCACHE.values(), ids=lambda release: release.name)
def test_the_table_says_of_lmcache_what_its_options_say(release: Any) -> None:
    lmcache = record("lmcache", release.name)
    server = {flag: row for row in lmcache["server"] for flag in row["flags"]}

    assert release.has_server == bool(server)
    assert release.has_kv_events == ("enable_kv_events" in lmcache["settings"])
    if server:
        assert release.names_instances == ("--instance-id" in server)
        assert release.reports_chunks == ("--coordinator-event-reporting" in server)
        assert list(release.eviction_policies) == server["--eviction-policy"]["choices"]
        assert set(release.prefetch_policies) == set(server["--l2-prefetch-policy"]["choices"])
