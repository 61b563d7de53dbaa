from penstock.core.sampling import keyed_uniform


def test_the_number_depends_on_seed_and_position_alone() -> None:
    assert keyed_uniform(7, 3) == keyed_uniform(7, 3)
    assert len({keyed_uniform(seed, position) for seed in range(-50, 50) for position in range(100)}) == 10_000


def test_numbers_are_spread_evenly_over_the_unit_interval() -> None:
    counts = [0] * 20
    for position in range(20_000):
        counts[int(keyed_uniform(1234, position) * 20)] += 1
    assert all(850 < count < 1150 for count in counts)  # 1000 each; 5 standard deviations are 154
