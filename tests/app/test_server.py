import resource

import pytest

from kvroute.app.server import raise_descriptor_limit


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_files_are_limited_by_the_hard_limit_only(limits):
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))

    assert raise_descriptor_limit() == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_low_descriptor_limit_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))

    assert raise_descriptor_limit() == 1024
    assert "about 512 concurrent streams" in caplog.text
