from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from click.testing import CliRunner

from kvroute.cli import main


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["sim", *arguments])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_ready_line_names_the_url_and_a_signal_ends_it_well(number):
    command = [sys.executable, "-m", "kvroute", "sim", "--port", "0", "--time-scale", "0"]
    command += ["--model", "a", "--model", "b", "--lora", "ada=a", "--capacity-tokens", "3200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            (url,) = re.findall(r"http://127\.0\.0\.1:\d+", line)
            with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as answer:
                models = [card["id"] for card in json.load(answer)["data"]]
            with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
                metrics = answer.read().decode()
        finally:
            process.send_signal(number)
            output, errors = process.communicate(timeout=20)

    assert models == ["a", "b", "ada"]
    assert 'num_gpu_blocks="200"' in metrics
    assert (process.returncode, output, errors) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora", "ada"], "NAME=PARENT"),
        (["--block-size", "0"], "block_size"),
        (["--event-dialect", "morse"], "morse"),
        (["--port", "70000"], "port"),
    ],
)
def test_wrong_flags_are_usage_errors_that_name_the_flag(arguments, message):
    result = invoke(*arguments)

    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    "arguments",
    [["--host", "192.0.2.1", "--no-events"], ["--port", "0", "--event-endpoint", "tcp://192.0.2.1:1"]],
)
def test_an_address_that_cannot_be_used_is_one_line(arguments):
    result = invoke(*arguments)

    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
