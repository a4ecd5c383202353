import asyncio
import pickle
from dataclasses import replace

import pytest
from tests.support.clocks import AdvancingClock, ManualClock

from kvroute.app.reloading import (
    ConfigReload,
    InForce,
    SharedReload,
    changes,
    check_change,
    next_in_force,
    watch_file,
)
from kvroute.config import paths as config_loading
from kvroute.config.config import Config
from kvroute.config.loading import ConfigSource, FlagFile, load
from kvroute.config.paths import ConfigSetting
from kvroute.errors import InvalidConfig
from kvroute.metrics import Metrics
from kvroute.options import may_change

WORKERS = "fleet:\n  workers: [http://127.0.0.1:1]\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr("kvroute.app.reloading.configure", lambda options: None)  # pytest owns the loggers
    file = tmp_path / "kvroute.yaml"
    file.write_text(WORKERS)
    return file


def in_force_of(file) -> InForce:
    loaded = load(file=file)
    return InForce.at_start(loaded.config, str(file), ManualClock(), loaded.signature)


def test_options_say_themselves_whether_they_may_change():
    may = {
        config_loading.dotted(path)
        for path, field in config_loading.walk(Config)
        if field.json_schema_extra["reload"]
    }
    assert may == {
        "fleet.workers",
        "fleet.aliases",
        "fleet.health",
        "routing.strategy",
        "routing.costs",
        "routing.models",
        "routing.session.keys",
        "retries",
        "upstream.connect_timeout_s",
        "upstream.first_byte_timeout_s",
        "upstream.idle_timeout_s",
        "upstream.keepalive_s",
        "upstream.max_connections",
        "upstream.max_idle",
        "upstream.spare_connections",
        "upstream.read_buffer_bytes",
        "streams",
        "server.max_in_flight",
        "server.max_body_bytes",
        "admission",
        "logging.level",
    }


@pytest.mark.parametrize(
    ("path", "may"),
    [
        ("retries.statuses", True),
        ("fleet.health.interval_s", True),
        ("fleet.workers_of_another_name", False),
        ("fleet.file", False),
        ("server.port", False),
        ("nothing", False),
    ],
)
def test_what_a_section_declares_holds_for_its_options(path, may):
    assert may_change(Config, path.split(".")) is may


def test_changes_are_named_option_by_option():
    after = Config.model_validate({"server": {"port": 1}, "retries": {"statuses": [503]}})

    assert changes(Config(), after) == [("server", "port"), ("retries", "statuses")]


def test_a_change_of_an_option_that_needs_a_restart_is_refused_with_file_and_line(file):
    before = in_force_of(file)
    file.write_text(WORKERS + "server:\n  port: 9\nretries:\n  budget_percent: 1\n")

    with pytest.raises(InvalidConfig) as refused:
        check_change(before, load(file=file))

    assert str(refused.value) == (
        "server.port: cannot change while the gateway runs: restart it (kvroute.yaml:4)"
    )


def test_a_strategy_that_needs_what_the_gateway_does_not_read_is_refused(file):
    before = in_force_of(file)
    file.write_text(WORKERS + "routing:\n  strategy: kvaware\n")

    with pytest.raises(InvalidConfig, match=r"routing\.strategy: the new strategy needs"):
        check_change(before, load(file=file))


def test_session_keys_of_no_known_kind_are_refused(file):
    before = in_force_of(file)
    file.write_text(WORKERS + "routing:\n  session:\n    keys: [query:id]\n")

    with pytest.raises(InvalidConfig, match=r"routing\.session\.keys: 'query:id' is none of"):
        check_change(before, load(file=file))


def test_a_flag_file_is_loaded_once_more_after_the_start_and_its_settings_replace_the_flags(file, tmp_path):
    def setting(strategy: str) -> ConfigSetting:
        return ConfigSetting(("routing", "strategy"), strategy, "--routing-logic")

    found = ["session"]
    then = (ConfigSetting(("server", "port"), 9, "--port"),)
    flag_file = FlagFile(tmp_path / "flags.yaml", lambda: [setting(found[-1])], then)
    loaded = load(file=file, flags=[setting("roundrobin"), *then], flag_file=flag_file)
    again = loaded.source.load()

    assert (loaded.config.routing.strategy, again.config.routing.strategy) == ("roundrobin", "session")
    assert (loaded.config.server.port, again.config.server.port) == (9, 9)
    assert loaded.source.watched == tmp_path / "flags.yaml"
    assert loaded.signature is None
    assert str(loaded.source) == str(tmp_path / "flags.yaml")


def test_a_gateway_can_return_to_the_strategy_of_its_start(file):
    file.write_text(WORKERS + "routing:\n  strategy: kvaware\n")
    before, source = in_force_of(file), load(file=file).source
    file.write_text(WORKERS)
    between = next_in_force(before, source, ManualClock())
    file.write_text(WORKERS + "routing:\n  strategy: kvaware\n")
    after = next_in_force(between, source, ManualClock())

    assert (between.outcome, after.outcome) == ("loaded", "loaded")
    assert after.config == before.config
    assert (
        between.construction.routing.strategy == "kvaware"
    )  # a process that starts now has the parts for it


def test_limits_of_workers_need_a_queue_from_the_start(file):
    limited = WORKERS + "admission:\n  max_concurrent: 4\n"
    without = in_force_of(file)
    file.write_text(limited)
    source, with_queue = load(file=file).source, in_force_of(file)
    file.write_text(WORKERS)
    off = next_in_force(with_queue, source, ManualClock())
    file.write_text(limited)

    assert off.config.admission.max_concurrent == 0
    assert next_in_force(off, source, ManualClock()).config.admission.max_concurrent == 4
    with pytest.raises(InvalidConfig, match="admission: no worker had a limit when the gateway started"):
        check_change(without, load(file=file))


def test_a_configuration_without_workers_is_refused(file):
    before = in_force_of(file)
    file.write_text("")

    with pytest.raises(InvalidConfig, match="no workers"):
        check_change(before, load(file=file))


def test_a_refused_configuration_is_remembered_and_the_old_one_stays(file):
    before, source = in_force_of(file), load(file=file).source
    file.write_text(WORKERS + "retries:\n  budget_procent: 1\n")

    after = next_in_force(before, source, ManualClock())

    assert after.config is before.config
    assert after.outcome == "refused"
    assert after.described()["digest"] == before.described()["digest"]
    (problem,) = after.described()["last_refused"]["problems"]
    assert "did you mean retries.budget_percent?" in problem
    assert "kvroute.yaml:4" in problem


def test_a_changed_configuration_has_another_digest_and_an_equal_one_changes_nothing(file):
    before, source = in_force_of(file), load(file=file).source
    same = next_in_force(before, source, ManualClock())
    file.write_text(WORKERS + "retries:\n  budget_percent: 1\n")
    after = next_in_force(same, source, ManualClock())

    assert (same.outcome, same.config) == ("unchanged", before.config)
    assert (after.outcome, after.changed) == ("loaded", ("retries.budget_percent",))
    assert after.config.retries.budget_percent == 1
    assert after.described()["digest"] != before.described()["digest"]


def test_if_one_service_fails_all_return_to_the_old_configuration(file):
    before, metrics = in_force_of(file), Metrics()
    reload, applied = ConfigReload(before, metrics, counts=True), []

    def failing(config):
        if config is not before.config:
            raise RuntimeError("defect")

    reload.appliers += [applied.append, failing]
    file.write_text(WORKERS + "retries:\n  budget_percent: 1\n")
    result = next_in_force(before, load(file=file).source, ManualClock())
    reload.apply(result)

    assert applied == [result.config, before.config]
    assert reload.in_force.config is before.config
    assert reload.in_force.refused == ("internal error: RuntimeError",)
    assert metrics.config_reloads.labels("failed").value == 1


def test_a_result_is_applied_once(file):
    before, metrics = in_force_of(file), Metrics()
    reload, applied = ConfigReload(before, metrics, counts=True), []
    reload.appliers.append(applied.append)
    file.write_text(WORKERS + "retries:\n  budget_percent: 1\n")
    result = next_in_force(before, load(file=file).source, ManualClock())
    reload.apply(result)
    reload.apply(result)

    assert applied == [result.config]
    assert metrics.config_reloads.labels("loaded").value == 1


def test_a_defect_while_a_configuration_is_loaded_leaves_the_old_one_in_force(file, monkeypatch, caplog):
    before = in_force_of(file)

    def fails(self):
        raise LookupError("secret")

    monkeypatch.setattr(ConfigSource, "load", fails)
    after = next_in_force(before, ConfigSource(file), ManualClock())

    assert (after.outcome, after.config) == ("refused", before.config)
    assert after.refused == ("internal error: LookupError",)
    assert "the configuration cannot be loaded" in caplog.text


def test_processes_get_the_parents_result(file, tmp_path):
    shared = SharedReload(in_force_of(file), load(file=file).source, tmp_path, ManualClock())
    before = shared.read()
    file.write_text(WORKERS + "retries:\n  budget_percent: 1\n")
    shared.load()

    assert before.outcome == "started"
    assert shared.read() == shared.in_force
    assert shared.read().config.retries.budget_percent == 1
    assert (tmp_path / "configuration").stat().st_mode & 0o077 == 0


def test_a_result_that_cannot_be_passed_on_is_refused(file, tmp_path, caplog):
    before = in_force_of(file)
    shared = SharedReload(before, load(file=file).source, tmp_path / "removed", ManualClock())
    file.write_text(WORKERS + "retries:\n  budget_percent: 1\n")
    shared.load()

    assert shared.in_force.config is before.config
    assert "cannot be passed to the processes: No such file or directory" in caplog.text
    assert "loaded again" not in caplog.text


def test_a_result_survives_pickling(file):
    in_force = in_force_of(file)

    assert pickle.loads(pickle.dumps(in_force)) == in_force


async def test_a_file_is_loaded_once_when_it_no_longer_changes(file, monkeypatch):
    seen = 0
    monkeypatch.setattr("kvroute.app.reloading.signatures", lambda files: (seen,))
    in_force, clock, calls = replace(in_force_of(file), signature=0), AdvancingClock(), []
    monkeypatch.setattr(asyncio, "to_thread", _inline)
    watching = asyncio.create_task(watch_file(file, 1.0, lambda: in_force, lambda: calls.append(seen), clock))
    for step in (0, 1, 2, 3, 3, 3, 3):
        seen = step
        await clock.advance(1.0)
    in_force = replace(in_force, signature=3)
    for step in (3, 4, 0, 0, 4, 4):
        seen = step
        await clock.advance(1.0)
    watching.cancel()

    assert calls == [3, 0, 4]


async def _inline(function, *arguments):
    return function(*arguments)
