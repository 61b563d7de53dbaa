import pytest

from penstock.core.token_logprobs import TokenScore, read_rows, write_rows

A = TokenScore(-0.5, 3, [(70_000, -0.25), (2, -2.0)])
B = TokenScore(-8.0, 200_000, [(1, -0.125), (5, -1.0)])


def test_rows_are_read_as_they_were_written() -> None:
    rows = write_rows([A]) + write_rows([]) + write_rows([B, A])
    assert read_rows(rows, [2, 1, 3], 2) == [[A], [], [B, A]]
    assert read_rows(write_rows([TokenScore(-1.0, 1, [])]), [2], 0) == [[TokenScore(-1.0, 1, [])]]


def test_rows_of_other_texts_are_noticed() -> None:
    with pytest.raises(AssertionError):
        read_rows(write_rows([A]), [3], 2)
