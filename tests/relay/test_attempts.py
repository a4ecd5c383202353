from kvroute.relay.retry_budget import RetryBudget
from kvroute.upstream.options import RetryOptions


def test_a_quiet_gateway_may_retry_up_to_its_floor():
    budget = RetryBudget(RetryOptions(budget_min_per_s=2))

    assert [budget.take(0.0) for _ in range(21)].count(True) == 20


def test_a_busy_gateway_may_retry_its_share():
    budget = RetryBudget(RetryOptions(budget_percent=20, budget_min_per_s=0))
    for _ in range(100):
        budget.count_request(0.0)

    assert [budget.take(0.0) for _ in range(50)].count(True) == 20


def test_spent_retries_come_back_with_time():
    budget = RetryBudget(RetryOptions(budget_percent=0, budget_min_per_s=0.1))
    assert budget.take(0.0)
    assert not budget.take(0.1)

    assert budget.take(60.0)


def test_no_budget_means_no_retry():
    assert not RetryBudget(RetryOptions(budget_percent=0, budget_min_per_s=0)).take(0.0)
