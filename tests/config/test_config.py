from __future__ import annotations

from pathlib import Path

import pytest

from kvroute.config import paths as config_loading
from kvroute.config.config import Config
from kvroute.config.loading import load
from kvroute.config.paths import ConfigSetting, dotted, is_secret, options_of, shape_at, split, walk
from kvroute.errors import InvalidConfig


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "kvroute.yaml") -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


def problems(**sources) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load(**sources)
    return [str(problem) for problem in caught.value.problems]


class TestPrecedence:
    def test_without_any_source_everything_has_its_default(self):
        assert load().config == Config()

    def test_environment_beats_file_and_set_beats_environment_and_a_flag_beats_all(self, write):
        file = write("server: {port: 1, backlog: 1, max_in_flight: 1, host: file}")
        environ = {
            "KVROUTE__SERVER__PORT": "2",
            "KVROUTE__SERVER__BACKLOG": "2",
            "KVROUTE__SERVER__MAX_IN_FLIGHT": "2",
        }
        assignments = ["server.port=3", "server.backlog=3"]
        flags = [ConfigSetting(("server", "port"), 4, "--port")]

        loaded = load(file=file, environ=environ, assignments=assignments, flags=flags)

        server = loaded.config.server
        assert (server.port, server.backlog, server.max_in_flight, server.host) == (4, 3, 2, "file")
        assert {dotted(path): origin for path, origin in loaded.origins.items()} == {
            "server.port": "--port",
            "server.backlog": "--set server.backlog",
            "server.max_in_flight": "KVROUTE__SERVER__MAX_IN_FLIGHT",
            "server.host": "kvroute.yaml:1",
        }

    def test_mappings_merge_and_lists_are_replaced(self, write):
        file = write("fleet: {workers: ['http://a:1', 'http://b:1'], aliases: {x: m, y: m}}")

        config = load(
            file=file, environ={"KVROUTE__FLEET__WORKERS": "http://c:1", "KVROUTE__FLEET__ALIASES": "{y: n}"}
        ).config

        assert [worker.url for worker in config.fleet.workers] == ["http://c:1"]
        assert config.fleet.aliases == {"x": "m", "y": "n"}

    def test_a_value_where_a_section_belongs_is_an_error_that_a_later_source_can_undo(self, write):
        file = write("server: 5")

        assert problems(file=file)[0].startswith("server: ")
        assert load(file=file, assignments=["server.port=9"]).config.server.port == 9


class TestFile:
    @pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
    def test_an_empty_file_sets_nothing(self, write, text):
        assert load(file=write(text)).config == Config()

    def test_a_section_with_nothing_below_it_sets_nothing(self, write):
        assert load(file=write("server:\nfleet:\n  health:\n")).config == Config()

    @pytest.mark.parametrize(
        ("word", "value"), [("on", True), ("off", False), ("yes", True), ("false", False)]
    )
    def test_switches_take_yaml_1_1_words(self, write, word, value):
        config = load(file=write(f"server: {{allow_strategy_header: {word}}}")).config

        assert config.server.allow_strategy_header is value

    def test_all_problems_are_reported_together_with_their_lines(self, write):
        text = "server:\n  prot: 1\n  backlog: many\nfleet:\n  health:\n    interval_s: -1\nroutng: {}\n"

        found = problems(file=write(text), environ={"KVROUTE__SERVER__HSOT": "x"}, assignments=["nonsense"])

        assert found[:2] == [
            "server.hsot: unknown option; did you mean server.host? (KVROUTE__SERVER__HSOT)",
            "--set takes PATH=VALUE, such as --set server.port=8081",
        ]
        assert "server.prot: unknown option; did you mean server.port? (kvroute.yaml:2)" in found
        assert "routng: unknown option; did you mean routing? (kvroute.yaml:7)" in found
        assert any(p.startswith("server.backlog: ") and "'many'" in p and p.endswith(":3)") for p in found)
        assert any(
            p.startswith("fleet.health.interval_s: ") and "-1" in p and p.endswith(":6)") for p in found
        )
        assert len(found) == 6

    def test_the_error_for_an_option_in_the_wrong_section_names_the_right_one(self, write):
        assert problems(file=write("routing: {max_body_bytes: 1}")) == [
            "routing.max_body_bytes: unknown option; did you mean server.max_body_bytes? (kvroute.yaml:1)"
        ]

    @pytest.mark.parametrize(("before", "now"), config_loading._RENAMED.items())
    def test_the_error_for_a_renamed_option_names_the_new_one(self, write, before, now):
        *sections, last = before.split(".")
        text = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(sections))
        file = write(f"{text}{'  ' * len(sections)}{last}: 1\n")

        assert problems(file=file) == [
            f"{before}: this option is now called {now} (kvroute.yaml:{len(sections) + 1})"
        ]
        assert problems(assignments=[f"{before}=1"]) == [
            f"{before}: this option is now called {now} (--set {before})"
        ]
        load(assignments=[f"{now}=1"])

    def test_a_key_like_no_option_gets_no_suggestion(self, write):
        assert problems(file=write("zzz: 1")) == ["zzz: unknown option (kvroute.yaml:1)"]

    def test_an_unknown_key_of_a_list_item_is_named_with_its_place_and_line(self, write):
        text = "fleet:\n  workers:\n    - url: http://a:1\n    - url: http://b:1\n      modles: [m]\n"

        assert problems(file=write(text)) == [
            "fleet.workers.1.modles: unknown option; did you mean fleet.workers.1.models? (kvroute.yaml:5)"
        ]

    def test_a_required_key_of_a_list_item_is_named(self, write):
        assert problems(file=write("fleet:\n  workers:\n    - id: a\n")) == [
            "fleet.workers.0.url: is required (kvroute.yaml:3)"
        ]

    def test_duplicate_keys_are_errors_at_any_depth(self, write):
        text = "server:\n  port: 1\n  port: 2\nfleet:\n  workers:\n    - {url: http://a:1, url: http://b:1}\n"

        assert problems(file=write(text)) == [
            "server.port: given twice, in lines 2 and 3 of kvroute.yaml",
            "fleet.workers.0.url: given twice, in lines 6 and 6 of kvroute.yaml",
        ]

    def test_a_key_that_yaml_reads_as_a_boolean_is_pointed_out(self, write):
        found = problems(file=write("fleet: {aliases: {on: m}}"))

        assert found == [
            "fleet.aliases.on: YAML reads this key as a boolean: put it in quotes (kvroute.yaml:1)"
        ]

    def test_anchors_and_merge_keys_work(self, write):
        text = "fleet: {aliases: &a {x: m, <<: {y: n}}}\n"

        assert load(file=write(text)).config.fleet.aliases == {"x": "m", "y": "n"}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("- a\n", "expected sections such as `server:` at the top"),
            ("server: [\n", "is not YAML: "),
            ("a: 1\n---\nb: 2\n", "is not YAML: "),
            ("? [a]\n: 1\n", "is not YAML: "),
            ("a: !!python/name:os.system\n", "is not YAML: "),
            ("server: " + "[" * 10_000, "is not YAML: it is nested too deeply"),
            ("server: &a\n  port: *a\n", "is not YAML: it is nested too deeply"),
            ("server: {port: " + "9" * 5_000 + "}\n", "is not YAML: "),
            ("server: {port: 2026-13-01}\n", "is not YAML: month must be in 1..12"),
        ],
    )
    def test_a_file_that_is_no_configuration_gives_a_one_line_error(self, write, text, message):
        (found,) = problems(file=write(text))

        assert message in found
        assert "\n" not in found

    def test_a_missing_file_is_named(self, tmp_path):
        assert problems(file=tmp_path / "no.yaml") == [
            f"cannot read {tmp_path / 'no.yaml'}: No such file or directory"
        ]

    def test_a_file_that_is_not_text_is_named(self, tmp_path):
        (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")

        assert problems(file=tmp_path / "b.yaml") == [
            f"cannot read {tmp_path / 'b.yaml'}: it is not UTF-8 text"
        ]

    def test_relative_paths_start_at_the_files_own_folder(self, write, tmp_path):
        config = load(file=write("fleet: {file: workers.yaml}")).config

        assert config.fleet.file == tmp_path / "workers.yaml"

    def test_absolute_paths_and_those_from_the_environment_stay_as_they_are(self, write):
        file = write("fleet: {file: /etc/workers.yaml}")

        assert load(file=file).config.fleet.file == Path("/etc/workers.yaml")
        assert load(environ={"KVROUTE__FLEET__FILE": "w.yaml"}).config.fleet.file == Path("w.yaml")

    def test_variables_are_not_expanded(self, write, monkeypatch):
        monkeypatch.setenv("HOST", "expanded")

        assert load(file=write("server: {host: '${HOST}'}")).config.server.host == "${HOST}"


class TestEnvironment:
    def test_other_names_are_ignored(self):
        environ = {
            "KVROUTE_PORT": "tcp://10.0.0.1:80",
            "KVROUTE_SERVICE_HOST": "10.0.0.1",
            "KVROUTE_PORT_8080_TCP_ADDR": "10.0.0.1",
            "SERVER__PORT": "1",
        }

        assert load(environ=environ).config == Config()

    def test_an_unknown_name_is_an_error_that_names_the_variable(self):
        assert problems(environ={"KVROUTE__SERVER__MAX_BODY_BITES": "1"}) == [
            "server.max_body_bites: unknown option; did you mean server.max_body_bytes? "
            "(KVROUTE__SERVER__MAX_BODY_BITES)"
        ]

    @pytest.mark.parametrize("name", ["KVROUTE__", "KVROUTE__SERVER__", "KVROUTE____PORT"])
    def test_a_name_with_an_empty_part_is_an_error(self, name):
        assert len(problems(environ={name: "1"})) == 1

    def test_a_value_of_the_wrong_type_names_the_variable(self):
        (found,) = problems(environ={"KVROUTE__SERVER__PORT": "http"})

        assert found.startswith("server.port: ")
        assert found.endswith("(KVROUTE__SERVER__PORT)")

    @pytest.mark.parametrize("text", ["0123", "1e3", "on", "null", "a: b", "[x"])
    def test_text_is_used_unchanged(self, text):
        config = load(environ={"KVROUTE__FLEET__WORKER_API_KEY": text, "KVROUTE__SERVER__HOST": text}).config

        assert config.fleet.worker_api_key is not None
        assert config.fleet.worker_api_key.get_secret_value() == text
        assert config.server.host == text

    def test_nothing_means_not_set_where_that_is_allowed(self):
        environ = {
            "KVROUTE__ADMIN__API_KEY": "",
            "KVROUTE__SERVER__API_KEYS": "",
            "KVROUTE__FLEET__FILE": " ",
        }

        assert load(environ=environ).config == Config()

    @pytest.mark.parametrize(
        "text", ["http://a:1,http://b:1", '["http://a:1", "http://b:1"]', "[http://a:1, http://b:1]"]
    )
    def test_lists_are_json_or_yaml_or_have_commas(self, text):
        config = load(environ={"KVROUTE__FLEET__WORKERS": text}).config

        assert [worker.url for worker in config.fleet.workers] == ["http://a:1", "http://b:1"]

    def test_lists_of_mappings_are_json(self):
        config = load(environ={"KVROUTE__FLEET__WORKERS": '[{"url": "http://a:1", "id": "a"}]'}).config

        assert config.fleet.workers[0].id == "a"

    def test_a_whole_section_can_be_a_mapping(self):
        assert load(environ={"KVROUTE__SERVER": '{"port": 9, "host": "h"}'}).config.server.port == 9

    @pytest.mark.parametrize(
        ("name", "text", "expected"),
        [
            ("KVROUTE__FLEET__WORKERS", "[a", "expected a list such as [a, b]"),
            ("KVROUTE__FLEET__ALIASES", "a,b", "expected a mapping such as {a: 1}"),
            ("KVROUTE__FLEET__ALIASES", "{a", "expected a mapping such as {a: 1}"),
            ("KVROUTE__SERVER", "5", "expected a mapping such as {a: 1}"),
        ],
    )
    def test_the_error_for_text_of_the_wrong_shape_names_the_expected_one(self, name, text, expected):
        (found,) = problems(environ={name: text})

        assert found.endswith(f"{expected} ({name})")

    def test_keys_of_a_mapping_keep_their_case(self):
        assert load(environ={"KVROUTE__FLEET__ALIASES__GPT": "m"}).config.fleet.aliases == {"GPT": "m"}

    def test_every_plain_option_can_be_set_to_its_default_from_the_environment(self):
        values = Config().model_dump(mode="json")
        environ = {}
        for path, _ in walk(Config):
            if options_of(shape_at(Config, path)):
                continue
            value = values
            for key in path:
                value = value[key]
            if isinstance(value, (bool, int, float, str)):
                environ["KVROUTE__" + "__".join(path).upper()] = str(value)

        assert len(environ) > 30
        assert load(environ=environ).config == Config()


class TestAssignments:
    def test_a_key_with_dots_is_quoted(self):
        loaded = load(assignments=['fleet.aliases."gpt-4.1"=m'])

        assert loaded.config.fleet.aliases == {"gpt-4.1": "m"}
        assert loaded.origins == {("fleet", "aliases", "gpt-4.1"): '--set fleet.aliases."gpt-4.1"'}

    def test_the_value_may_hold_equals_signs(self):
        assert (
            load(assignments=["fleet.worker_api_key=a=b"]).config.fleet.worker_api_key.get_secret_value()
            == "a=b"
        )

    @pytest.mark.parametrize("text", ["server.port", "=1", "server..port=1", 'a"b=1', ".a=1", 'a."b=1'])
    def test_text_that_is_no_assignment_is_refused(self, text):
        assert problems(assignments=[text]) == ["--set takes PATH=VALUE, such as --set server.port=8081"]

    def test_an_unknown_path_is_an_error_with_a_suggestion(self):
        assert problems(assignments=["server.ports=1"]) == [
            "server.ports: unknown option; did you mean server.port? (--set server.ports)"
        ]


class TestSecrets:
    def test_a_secret_comes_from_its_file_without_the_newline(self, tmp_path):
        (tmp_path / "key").write_text("s3cret-0123456789\n")

        config = load(environ={"KVROUTE__ADMIN__API_KEY_FILE": str(tmp_path / "key")}).config

        assert config.admin.api_key.get_secret_value() == "s3cret-0123456789"

    def test_a_list_of_secrets_is_one_a_line(self, tmp_path, write):
        (tmp_path / "keys").write_text("# clients\none\n\n  two  \n")

        config = load(file=write("server: {api_keys_file: keys}")).config

        assert [key.get_secret_value() for key in config.server.api_keys] == ["one", "two"]

    def test_a_secret_given_twice_is_an_error(self, tmp_path):
        (tmp_path / "key").write_text("s3cret-0123456789")

        found = problems(
            assignments=[f"admin.api_key_file={tmp_path / 'key'}", "admin.api_key=another-admin-key"]
        )

        assert found == ["admin.api_key_file: set either this or admin.api_key, not both"]

    def test_an_empty_or_missing_secret_file_is_an_error(self, tmp_path):
        (tmp_path / "empty").write_text("\n")

        found = problems(
            assignments=[
                f"admin.api_key_file={tmp_path / 'empty'}",
                f"server.api_keys_file={tmp_path / 'no'}",
            ]
        )

        assert found == [
            f"server.api_keys_file: cannot read {tmp_path / 'no'}: No such file or directory "
            "(--set server.api_keys_file)",
            f"admin.api_key_file: {tmp_path / 'empty'} is empty (--set admin.api_key_file)",
        ]

    def test_a_file_of_comments_is_not_open_to_everybody(self, tmp_path):
        file = tmp_path / "keys"
        file.write_text("# none yet\n")

        assert problems(assignments=[f"server.api_keys_file={file}"]) == [
            f"server.api_keys_file: {file} holds no key (--set server.api_keys_file)"
        ]
        assert problems(assignments=[f"admin.api_key_file={file}"]) == [
            f"admin.api_key: holds no key ({file})"
        ]

    def test_several_admin_keys_are_one_a_line(self, tmp_path):
        file = tmp_path / "keys"
        file.write_text("# newest first\nnew-0123456789abc\nold-0123456789abc\n")

        assert load(assignments=[f"admin.api_key_file={file}"]).config.admin.keys == (
            "new-0123456789abc",
            "old-0123456789abc",
        )
        one = "one,key-0123456789"
        assert load(environ={"KVROUTE__ADMIN__API_KEY": one}).config.admin.keys == (one,)
        assert load().config.admin.keys == ()

    def test_blank_keys_are_errors(self, write):
        for text in ("server: {api_keys: ['']}", "server: {api_keys: [a, ' ']}", "admin: {api_key: ''}"):
            assert len(problems(file=write(text))) == 1, text

    def test_a_short_admin_key_is_an_error_that_does_not_show_it(self, tmp_path):
        (tmp_path / "keys").write_text("long-enough-0123456789\nshortshortshort\n")

        (one,) = problems(assignments=["admin.api_key=hidden-as-is"])
        (two,) = problems(assignments=[f"admin.api_key_file={tmp_path / 'keys'}"])

        assert one.startswith("admin.api_key: the key has 12 characters; an admin key needs 16 or more")
        assert two.startswith("admin.api_key: key 2 of 2 has 15 characters;")
        assert two.endswith(f"({tmp_path / 'keys'})")
        assert "hidden" not in one
        assert "shortshort" not in two

    def test_a_file_with_a_secret_that_every_user_may_write_is_an_error(self, tmp_path):
        file = tmp_path / "key"
        file.write_text("secret-0123456789")
        file.chmod(0o666)

        for name in ("admin.api_key", "fleet.worker_api_key", "server.api_keys", "sharing.password"):
            (found,) = problems(assignments=[f"{name}_file={file}"])
            assert found.startswith(f"{name}_file: {file} has mode 0666: every user may have written it"), (
                found
            )

    def test_a_clients_key_cannot_be_the_admin_key(self, write):
        text = "server: {api_keys: [hidden-0123456789]}\nadmin: {api_key: hidden-0123456789}\n"

        (found,) = problems(file=write(text))

        assert "every client would have it" in found
        assert "hidden" not in found

    def test_allowed_hosts_are_names_and_addresses(self):
        hosts = "admin.allowed_hosts=[gw.example, '::1', 10.0.0.1]"

        assert len(load(assignments=[hosts]).config.admin.allowed_hosts) == 3
        for wrong in ("https://gw", "gw:80", "*", "a b"):
            assert problems(assignments=[f"admin.allowed_hosts={wrong}"])

    def test_a_secret_file_that_is_not_text_is_an_error(self, tmp_path):
        (tmp_path / "key").write_bytes(b"\xff\xfe")

        assert "is not UTF-8 text" in problems(assignments=[f"admin.api_key_file={tmp_path / 'key'}"])[0]

    def test_no_error_shows_a_secret(self, write):
        text = (
            "admin: {api_key: [hidden1]}\n"
            "server: {api_keys: [[hidden2], {hidden: 3}], api_key: hidden4}\n"
            "fleet: {workers: ['http://hidden5:hidden6@host:1']}\n"
        )

        found = problems(file=write(text))

        assert len(found) == 5
        assert "hidden" not in "\n".join(found)


class TestPaths:
    @pytest.mark.parametrize("path", [("a",), ("a", "b.c", "d"), ("a", "x y"), ("",)])
    def test_a_written_path_reads_back(self, path):
        assert split(dotted(path)) == path


def test_every_secret_can_also_come_from_a_file():
    for path, _ in walk(Config):
        if is_secret(shape_at(Config, path)) and not options_of(shape_at(Config, path)):
            twin = (*path[:-1], f"{path[-1]}_file")

            assert shape_at(Config, twin), f"{dotted(twin)} is missing"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["lmcache.prefetch.enabled=true"], "set coordinator.enabled too"),
        (
            ["lmcache.prefetch.enabled=true", "lmcache.coordinator.enabled=true", "server.processes=2"],
            "set server.processes to 1",
        ),
    ],
)
def test_prefetching_needs_the_one_process_that_knows_lmcaches_servers(settings, wanted):
    (problem,) = problems(assignments=settings)

    assert "prefetch.enabled" in problem
    assert wanted in problem
