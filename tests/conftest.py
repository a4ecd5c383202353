"""Settings of all tests: no property fails because the machine is busy, and no gateway writes into the user's
home folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from tests.support.programs import program

settings.register_profile("kvroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvroute")


@pytest.fixture(autouse=True, scope="session")
def user_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where gateways keep the admin keys that they make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def system_program() -> Callable[[str], str]:
    """Find a program of the system: without it the test is skipped, and fails in CI."""

    return program
