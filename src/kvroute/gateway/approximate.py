"""When to log that prompts are routed without their exact tokens because tokenizing takes too long."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 200
"""Prompts of one model that a share is taken of."""
HIGH, LOW = 0.05, 0.02
"""Shares at which the warning begins and ends. Apart, so that a share in between does not log each time."""


@dataclass(slots=True)
class _Window:
    prompts: int = 0
    late: int = 0
    is_high: bool = False


class LateShare:
    """Mutable: counts prompts per model in windows of `WINDOW`."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def count(self, model: str, *, is_late: bool) -> tuple[bool, int] | None:
        """Whether the share is high now and how many of the last `WINDOW` prompts were late, if that has
        just changed; else None."""
        window = self._windows.get(model)
        if window is None:
            window = self._windows[model] = _Window()
        window.prompts += 1
        window.late += is_late
        if window.prompts < WINDOW:
            return None
        late, window.prompts, window.late = window.late, 0, 0
        is_high = late / WINDOW >= (LOW if window.is_high else HIGH)
        if is_high is window.is_high:
            return None
        window.is_high = is_high
        return is_high, late
