"""Further attempts are a share of the recent requests, and streams with tokens come first."""

from common.policies.retry_budget import RetryBudget, RetryPolicy

POLICY = RetryPolicy(share=0.2, min_per_second=1.0, window_seconds=10.0, resume_share=0.5)


def spent(budget: RetryBudget, now: float, *, resume: bool) -> int:
    count = 0
    while budget.take(now, resume=resume):
        count += 1
    return count


def test_a_minimum_without_any_requests() -> None:
    budget = RetryBudget(POLICY)
    assert spent(budget, 0.0, resume=False) == 5
    assert spent(budget, 0.0, resume=True) == 5  # the part that is kept for them
    assert not budget.take(9.9, resume=True)
    assert spent(budget, 10.5, resume=True) == 10


def test_a_share_of_the_recent_requests() -> None:
    budget = RetryBudget(POLICY)
    for i in range(500):
        budget.asked(i / 100)
    assert spent(budget, 5.0, resume=True) == 10 + 100
    assert spent(budget, 30.0, resume=True) == 10


def test_a_broken_fleet_sees_no_storm() -> None:
    """Every attempt fails, each request asks for four more: what arrives is the requests and the share."""
    budget = RetryBudget(POLICY)
    attempts = 0
    for i in range(6000):  # 100 a second for a minute
        now = i / 100
        budget.asked(now)
        attempts += 1
        for _ in range(4):
            if not budget.take(now, resume=False):
                break
            attempts += 1
    assert attempts <= 6000 * 1.2 + 60 * POLICY.min_per_second + 20


def test_resumes_have_precedence() -> None:
    budget = RetryBudget(POLICY)
    for i in range(100):
        budget.asked(i / 100)
    while budget.take(1.0, resume=False):
        pass
    assert budget.take(1.0, resume=True)
    while budget.take(1.0, resume=True):
        pass
    assert not budget.take(1.0, resume=False)


def test_memory_is_bounded() -> None:
    budget = RetryBudget(POLICY)
    for i in range(100_000):
        budget.asked(i / 10)
    assert len(budget._seconds) <= POLICY.window_seconds + 1
