"""Whether a worker's engine computes nothing now: it sleeps, or it is paused. Pure.

Its `/health` stays 200 then, and requests hang until it is woken up or resumed (vLLM 0.32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

IS_PAUSED: Final = "/is_paused"
IS_SLEEPING: Final = "/is_sleeping"

PAUSED: Final = "its engine is paused until /resume"
SLEEPS: Final = "its engine sleeps until /wake_up"


@dataclass(frozen=True, slots=True)
class SleepFacts:
    """What a worker's metrics show of sleep mode and of new weights (vLLM 0.32)."""

    is_asleep: bool = False
    """`vllm:engine_sleep_state`: not awake. Also a paused engine, after `/sleep?level=0`."""
    is_emptied: bool = False
    """Asleep at a level that discards the KV cache."""
    operations: int = 0
    """Completed operations since the start that may have emptied the cache: `/sleep`, the release of KV
    memory, updates of weights."""


class EngineState(NamedTuple):
    """What a worker answers to `IS_PAUSED` and `IS_SLEEPING`; None without an answer.

    vLLM has both only with VLLM_SERVER_DEV_MODE=1. A paused engine says there that it sleeps, too (0.32).
    """

    is_paused: bool | None = None
    is_sleeping: bool | None = None


def why_asleep(last_reason: str, state: EngineState, page: SleepFacts | None) -> str:
    """Why the engine computes nothing now: `PAUSED`, `SLEEPS`, or empty if it is awake.

    `last_reason` is the last result. `page`: the metrics, if they were read at the same time; answers to the
    two questions are newer than figures of an earlier page.
    """
    is_paused, is_sleeping = state
    if is_paused or is_sleeping:
        if page is None and last_reason:
            return last_reason
        return PAUSED if is_paused and not (page is not None and page.is_asleep) else SLEEPS
    if page is not None and None in state:
        return SLEEPS if page.is_asleep and is_sleeping is None else ""
    if last_reason == SLEEPS:
        return last_reason if is_sleeping is None else ""
    return last_reason if is_paused is None else ""
