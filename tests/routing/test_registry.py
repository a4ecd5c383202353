from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvroute.routing.cost_parameters import CostOptions
from kvroute.routing.registry import STRATEGIES, RoutingOptions


def test_the_default_is_prefixaware() -> None:
    assert RoutingOptions().strategy == "prefixaware"


@pytest.mark.parametrize("where", [{"strategy": "random"}, {"models": {"m": {"strategy": "random"}}}])
def test_an_unknown_strategy_is_refused_with_the_known_ones(where) -> None:
    with pytest.raises(ValidationError, match=f"'random' is none of {', '.join(STRATEGIES)}"):
        RoutingOptions.model_validate(where)


def test_a_models_costs_fill_up_from_the_common_ones() -> None:
    options = RoutingOptions.model_validate(
        {
            "costs": {"token_us": 100, "iteration_ms": 10},
            "models": {"big": {"costs": {"token_us": 900}}, "plain": {"strategy": "session"}},
        }
    )

    assert options.costs_of_models() == {"big": CostOptions(token_us=900, iteration_ms=10)}
