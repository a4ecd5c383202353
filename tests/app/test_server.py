import resource

import pytest

from kvroute.app import server
from kvroute.app.config import Config
from kvroute.app.runtime import Runtime
from kvroute.app.server import raise_descriptor_limit, uvicorn_config
from kvroute.gateway.opening import ClientProtocols


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


def test_a_low_limit_is_said(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))

    assert raise_descriptor_limit() == 1024
    assert "about 512 streams" in caplog.text


@pytest.mark.parametrize("trouble", ["", "does it otherwise"])
async def test_connections_open_as_ever_where_uvicorn_is_not_as_expected(trouble, monkeypatch, caplog):
    monkeypatch.setattr(server, "opening_trouble", lambda _: trouble)
    config = Config.model_validate({})
    async with Runtime(config) as runtime:
        protocols = uvicorn_config(config, runtime).http

    assert isinstance(protocols, ClientProtocols) is not bool(trouble)
    assert ("does it otherwise" in caplog.text) is bool(trouble)
