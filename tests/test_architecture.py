"""The ways in docs/architecture.md name files and functions that exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STEP = re.compile(r"^(\d+)\. ", re.MULTILINE)
PLACE = re.compile(r"`([\w/]+\.py)`(?: `([\w.]+)`)?")


def section(title):
    _, _, rest = PAGE.partition(f"\n## {title}\n")
    assert rest, f"no section {title!r}"
    return rest.partition("\n## ")[0]


def defined(path):
    """The names of a module's functions, classes and methods (`Class.method`)."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


@pytest.mark.parametrize("title", ["The way of a request", "The way of a KV event"])
def test_a_way_has_at_most_fifteen_steps_and_each_names_a_file(title):
    steps = STEP.split(section(title))[2::2]

    assert 5 <= len(steps) <= 15
    assert all(PLACE.search(step) for step in steps)


@pytest.mark.parametrize("title", ["The way of a request", "The way of a KV event"])
def test_each_function_of_a_way_exists(title):
    for file, name in PLACE.findall(section(title)):
        path = ROOT / "src" / "kvroute" / file
        assert path.is_file(), file
        assert not name or name in defined(path), f"{file} has no {name}"


def test_each_file_that_the_page_names_exists():
    for file, _ in PLACE.findall(PAGE):
        known = [*(ROOT / "src" / "kvroute").rglob(Path(file).name), ROOT / file]
        assert any(path.as_posix().endswith(file) and path.is_file() for path in known), file


WALL = re.compile(r"\btime\.time\(|\.wall\b|datetime\.now|utcnow|\btime_ns\(|gmtime\(\)|localtime\(\)")
READS_WALL = {
    "caches/tracker.py": "shows when a stream's last batch came",
    "app/listening.py": "whether a certificate has expired",
    "app/replica.py": "which of two changes by hand is the later one, on several machines",
    "app/reloading.py": "shows since when a configuration is in force",
    "app/runtime.py": "`created` of the models",
    "journal/compat_log_lines.py": "time in the log lines of production-stack's router",
    "access/client_keys.py": "`expires` of keys",
    "journal/journal.py": "time stamps of log lines, decisions and spans",
    "access/jwt.py": "`exp`, `nbf` and `iat` of tokens",
    "admin/live.py": "shows the time",
    "journal/tracing.py": "time stamps of spans",
    "cli/deployments.py": "`kvroute ps` shows since when a process runs",
    "cli/doctor.py": "time stamps of the support archive",
    "deploy/prepare.py": "dates of a self-signed certificate",
    "deploy/up.py": "the same as `kvroute ps`",
    "doctor/gather.py": "compares the clocks of two machines",
    "tokens/harmony.py": "the date of a chat of gpt-oss, as vLLM gives it",
    "tokens/local.py": "the date for a chat template, as vLLM gives it",
    "tokens/template.py": "the same",
}
"""File of src/kvroute -> for which date or display it reads the wall clock."""


def test_no_deadline_age_or_rate_depends_on_the_wall_clock():
    """It jumps. What lasts for a time is measured with `Clock.now`. The simulated worker shows dates only."""
    source = ROOT / "src" / "kvroute"
    found = {
        path.relative_to(source).as_posix() for path in source.rglob("*.py") if WALL.search(path.read_text())
    }

    assert {file for file in found if not file.startswith("sim/")} == READS_WALL.keys()


EXTRAS = (
    *("envoy", "grpc", "joserfc", "fastokens", "cryptography", "vllm", "lmcache", "torch"),
    *("opentelemetry.sdk", "opentelemetry.exporter"),
)


@pytest.mark.parametrize("module", ["kvroute.cli.serve", "kvroute.app.runtime", "kvroute.app.server"])
def test_the_gateway_loads_without_the_optional_packages(module):
    hide = "import sys; sys.modules.update(dict.fromkeys(sys.argv[2:])); __import__(sys.argv[1])"

    done = subprocess.run([sys.executable, "-c", hide, module, *EXTRAS], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


HUBS = (
    "app/runtime.py",
    "app/collectors.py",
    "app/reloading.py",
    "relay/dataplane.py",
    "metrics.py",
    "config/",
)
"""What every capability passes: these files know parts by their protocol and their list only."""


def imported(source):
    """The modules that a source imports, with the names that it takes from packages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def parts_of(source):
    """The modules of single parts that a source imports."""
    known = ("kvroute.parts", "kvroute.parts.part", "kvroute.parts.registry")
    return {
        name
        for name in imported(source)
        if name.startswith("kvroute.parts")
        and not any(name == each or name.startswith(f"{each}.") for each in known[1:])
    } - {known[0]}


def test_no_hub_imports_a_part():
    sources = ROOT / "src" / "kvroute"
    files = [
        path
        for hub in HUBS
        for path in ([sources / hub] if hub.endswith(".py") else (sources / hub).glob("*.py"))
    ]
    assert len(files) > len(HUBS)
    assert {path.name: parts_of(path.read_text()) for path in files if parts_of(path.read_text())} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from kvroute.parts import tracing",
        "from kvroute.parts.tracing import Spans",
        "import kvroute.parts.tracing",
    ],
)
def test_a_part_that_is_put_back_into_a_hub_is_found(line):
    assert parts_of(f"{line}\nfrom kvroute.parts.part import Stage\n")
