"""When answers to clients show that a worker fails, and for how long it then stays out. Pure."""

from __future__ import annotations

from collections import deque


class BurstWindow:
    """A worker's latest answers. Mutable: the window moves with each answer.

    A burst is `failures` failures among the last 2 x `failures` answers, none older than `window_s`:
    five in a row are one, as is half of what a busy worker says, while a rare error never is. Good answers
    before the first failure tell nothing and are not kept.
    """

    def __init__(self, failures: int, window_s: float) -> None:
        self._failures = failures
        self._window_s = window_s
        self._answers: deque[tuple[float, bool]] = deque(maxlen=2 * failures)

    def add(self, now: float, failed: bool) -> bool:
        """Count one answer; True if it completes a burst. A good answer costs O(1)."""
        answers = self._answers
        if not failed:
            if answers:
                answers.append((now, False))
                if not any(bad for _, bad in answers):
                    answers.clear()
            return False
        answers.append((now, True))
        oldest = now - self._window_s
        return sum(bad for at, bad in answers if at >= oldest) >= self._failures

    @property
    def is_clean(self) -> bool:
        """No failure is in it, so that another good answer changes nothing."""
        return not self._answers

    def clear(self) -> None:
        """Forget all of it: a new life begins."""
        self._answers.clear()


class Backoff:
    """How long each burst keeps a worker out: `base_s`, doubled each time, at most `max_s`.

    Mutable: the step rises with each burst; it starts anew after `max_s` without one.
    """

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._step = 0
        self._calm_from = 0.0

    def next_s(self, now: float) -> float:
        """Seconds to stay out for a burst at `now`."""
        if now > self._calm_from + self._max_s:
            self._step = 0
        # The exponent is capped only to keep the power finite.
        pause = min(self._max_s, self._base_s * 2.0 ** min(self._step, 60))
        self._step += 1
        self._calm_from = now + pause
        return pause
