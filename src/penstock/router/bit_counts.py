"""Counts of the sets that each element is in, for all elements at once. A set is an integer, a bit for each."""

from __future__ import annotations


class BitCounts:
    """The n-th of its integers has those in whose count the n-th binary digit is a one, so that to add a set is to add
    with carry: it takes as long for a thousand elements as for one."""

    __slots__ = ("_digits",)

    def __init__(self) -> None:
        self._digits: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._digits)

    def add(self, members: int) -> None:
        digits, at = self._digits, 0
        while members:
            if at == len(digits):
                digits.append(0)
            digits[at], members = digits[at] ^ members, digits[at] & members
            at += 1

    def of(self, bit: int) -> int:
        return sum([1 << at for at, digit in enumerate(self._digits) if digit & bit])
