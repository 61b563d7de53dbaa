from penstock.sched.budget import StepBudget


def observe(budget: StepBudget, step_s_per_token: float, rounds: int = 60) -> None:
    for _ in range(rounds):
        budget.observe(budget.tokens, 1, budget.tokens * step_s_per_token)


def test_slow_steps_shrink_the_budget_until_they_meet_the_target() -> None:
    budget = StepBudget(512, target_s=0.1, floor=16)
    observe(budget, 0.001)
    assert 70 <= budget.tokens <= 130


def test_the_budget_recovers_when_steps_are_fast_again() -> None:
    budget = StepBudget(512, target_s=0.1, floor=16)
    observe(budget, 0.1)
    assert budget.tokens == 16
    observe(budget, 1e-6)
    assert budget.tokens == 512


def test_steps_without_decodes_and_budgets_without_a_target_change_nothing() -> None:
    budget = StepBudget(512, target_s=0.1, floor=16)
    budget.observe(512, 0, 9.0)
    assert budget.tokens == 512
    free = StepBudget(512, target_s=None, floor=16)
    free.observe(512, 8, 9.0)
    assert free.tokens == 512


def test_a_small_step_says_nothing_about_a_large_budget() -> None:
    budget = StepBudget(512, target_s=0.1, floor=16)
    observe(budget, 0.001)
    before = budget.tokens
    for _ in range(50):
        budget.observe(1, 1, 0.01)
    assert budget.tokens == before


def test_a_step_without_decodes_may_be_full_whatever_the_target() -> None:
    budget = StepBudget(512, target_s=0.1, floor=16)
    observe(budget, 0.1)
    assert budget.tokens_beside(0) == 512
    assert budget.tokens_beside(4) == 12
