from penstock.router.learning import ObservedSpeeds, OutputLengths


def test_a_tenant_that_is_not_known_is_expected_to_be_as_the_others_of_its_model() -> None:
    lengths = OutputLengths()
    assert lengths.expected("t", "m", 10_000) == 256
    for _ in range(100):
        lengths.learn("other", "m", 1000)
    assert lengths.expected("t", "m", 10_000) == 1000
    assert lengths.expected("t", "other", 10_000) == 256


def test_a_tenants_own_answers_count_more_the_more_there_are_and_old_ones_are_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.learn("other", "m", 1000)
    lengths.learn("t", "m", 10)
    assert 600 < lengths.expected("t", "m", 10_000) < 1000
    for _ in range(50):
        lengths.learn("t", "m", 10)
    assert lengths.expected("t", "m", 10_000) < 110
    for _ in range(200):
        lengths.learn("t", "m", 3000)
    assert lengths.expected("t", "m", 10_000) > 2700


def test_a_hint_counts_before_what_was_learnt_and_nothing_beyond_the_limit() -> None:
    lengths = OutputLengths()
    assert lengths.expected("t", "m", 10_000, hint=7) == 7
    assert lengths.expected("t", "m", 5, hint=7) == 5
    assert lengths.expected("t", "m", 100) == 100
    assert lengths.expected("t", "m", 100, hint=0) == 1


def test_the_speed_of_a_server_without_reports_is_learnt_from_its_answers() -> None:
    speeds = ObservedSpeeds()
    assert speeds.of("p") is None
    for _ in range(10):
        speeds.learn("p", prompt_tokens=1000, ttft_s=0.25, output_tokens=100, decode_s=2.0)
    assert speeds.of("p") == (4000.0, 50.0)
    for _ in range(200):  # it has become slow
        speeds.learn("p", prompt_tokens=1000, ttft_s=1.0, output_tokens=100, decode_s=4.0)
    prefill, decode = speeds.of("p") or (0.0, 0.0)
    assert 1000.0 <= prefill < 1050.0
    assert 25.0 <= decode < 26.0
    assert speeds.of("q") is None


def test_an_answer_that_came_at_once_is_no_division_by_zero() -> None:
    speeds = ObservedSpeeds()
    speeds.learn("p", prompt_tokens=0, ttft_s=0.0, output_tokens=0, decode_s=0.0)
    assert speeds.of("p") == (1.0, 1.0)
