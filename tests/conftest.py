"""Settings of all tests: no property fails because the machine is busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvroute")
