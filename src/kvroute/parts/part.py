"""What a part is: one optional capability, and the places of the gateway that it may fill.

A part is a class with `options` and `build`. What else it has decides where it takes part: a method of one of
the other classes here is called where that class says. None of them waits, except `Background.run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from fastapi import APIRouter
from prometheus_client.core import Metric

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet
from kvroute.metrics import Metrics
from kvroute.options import Options
from kvroute.relay.call import Call
from kvroute.request.record import Record
from kvroute.routing.router import Router

_Section = TypeVar("_Section", bound=Options)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What a part may use of the gateway that builds it."""

    sections: Options
    """The whole configuration; see `section`."""
    clock: Clock
    metrics: Metrics
    """`metrics.registry` is for counters of the part's own."""
    fleet: Fleet
    router: Router
    number: int = 0
    """Of this process, of several that serve one port."""

    def section(self, options: type[_Section]) -> _Section:
        """The section of the configuration whose class is `options`. Raises LookupError."""
        for name in type(self.sections).model_fields:
            section = getattr(self.sections, name)
            if isinstance(section, options):
                return section
        raise LookupError(options.__name__)


class Part(Protocol):
    """One optional capability."""

    options: ClassVar[type[Options]]
    """The class of its section. An option with `reload=True` may change while the gateway runs."""

    @classmethod
    def build(cls, options: Any, gateway: Gateway) -> Self | None:
        """The part for `options`, a valid section; None if they turn it off. Raises ConfigError."""
        ...


@runtime_checkable
class Stage(Protocol):
    """Sees each request of a relayed endpoint once, after its key and before its tokens, queue and plan."""

    def enter(self, call: Call) -> None:
        """Let the request pass, or raise a GatewayError. On the event loop, for each request: keep it short.

        To hear of the end of this request: append a callback to `call.record.on_end`.
        """
        ...


@runtime_checkable
class Observer(Protocol):
    """Hears of finished requests."""

    def ended(self, record: Record) -> None:
        """A request is finished; called up to half a second later, with many others."""
        ...


@runtime_checkable
class Background(Protocol):
    """Has a task."""

    async def run(self) -> None:
        """Runs while the gateway does, in a task that is cancelled at its end."""
        ...


@runtime_checkable
class ControlPlane(Protocol):
    """Has endpoints of its own. Those below `/admin` need the admin key."""

    def routes(self) -> APIRouter: ...


@runtime_checkable
class Families(Protocol):
    """Has metrics that are read at a scrape."""

    def families(self) -> Iterable[Metric]: ...


@runtime_checkable
class Notes(Protocol):
    """Has something to say in `/ready` and on the live page."""

    def notes(self) -> Iterable[str]: ...


@runtime_checkable
class Reloads(Protocol):
    """Has options that may change while the gateway runs."""

    def configure(self, options: Any) -> None:
        """Use the changed section from now on. It must not fail for a valid section."""
        ...


PartTypes = Mapping[str, type[Part]]
"""Parts by the name of their section."""
