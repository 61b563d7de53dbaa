from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given

from penstock.core.sampling import SamplingParams
from penstock.core.watermark import Scheme, Seeding, Watermark, fraction_bits, fractions, mix, steps

SECRET = bytes(range(32))


def splitmix(seed: int, count: int) -> list[int]:
    """The generator as it is published."""
    mask, numbers = 2**64 - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


@given(st.integers(-(2**63), 2**63 - 1))
def test_bits_are_splitmix64s_and_the_same_to_numpy_and_torch(seed: int) -> None:
    in_numpy = mix(steps(np.arange(50)) + np.int64(seed))
    in_torch = mix(steps(torch.arange(50)) + seed)
    assert [int(bits) % 2**64 for bits in in_numpy] == splitmix(seed % 2**64, 50)
    assert in_torch.tolist() == in_numpy.tolist()
    assert fraction_bits(in_torch).tolist() == [number >> 12 for number in splitmix(seed % 2**64, 50)]
    assert (fractions(fraction_bits(in_numpy)) > 0).all()


def test_fractions_lie_strictly_between_zero_and_one() -> None:
    least, most = fractions(np.array([0, 2**52 - 1]))
    assert 0 < least < 1e-15
    assert least < most < 1


def test_seeds_depend_on_the_key_and_on_every_token_in_its_place() -> None:
    mark, other = Watermark(SECRET), Watermark(SECRET[::-1])
    contexts = [[1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 3, 5], [1, 2, 3], [256, 2, 3, 4]]
    seeds = [maker.seed(context) for maker in (mark, other) for context in contexts]
    assert len(set(seeds)) == len(seeds)
    assert mark.seeds([1, 2]) == [mark.seed([1, 2])]
    by_token = Watermark(SECRET, seeding=Seeding.SELF)
    assert by_token.seeds([1, 2]) == [mark.seed([1]), mark.seed([2])]


def test_a_secret_is_never_shown() -> None:
    params = SamplingParams(watermark=Watermark(b"\x41" * 32))
    for text in (repr(params), str(params), f"{params!r}"):
        assert "AAAA" not in text
        assert "4141" not in text


def test_it_crosses_to_the_engine_as_it_is() -> None:
    params = SamplingParams(watermark=Watermark(SECRET, Scheme.GUMBEL, width=7))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert b"watermark" not in msgspec.msgpack.encode(SamplingParams())


@pytest.mark.parametrize(
    "values", [{"secret": b"short"}, {"scheme": Scheme.GUMBEL, "seeding": Seeding.SELF, "secret": SECRET}]
)
def test_what_cannot_be_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"key|seeding"):
        Watermark(**values)  # type: ignore[arg-type]
