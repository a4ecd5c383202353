"""The tests of sockets run on both event loops."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop

_ON_BOTH_LOOPS = {"test_listening_backlog", "test_listening_tls"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], Any]]:
    if item.path.stem in _ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
