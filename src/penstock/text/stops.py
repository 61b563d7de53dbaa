"""Stop strings in a stream: the text up to the first one, with no more held back than could become one.

The stop that is complete first wins, and of several that end together the longest, so the cut does not depend on
how the text arrives in pieces.

`StopStrings` is an Aho-Corasick automaton, built once per request; each choice has a `StopScanner`, which is a number
and the text that is held back. A character of output costs the same whatever the number of stops, and the automaton
takes a few bytes per character of its stops: strangers choose them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_ROOT = 0


class StopStrings:
    """A node is a beginning that stops have; its number is also the position in `_next` of the character that goes on
    with it. If stops part at a node, the first has that place and the others are in `_branches`."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` keeps the stop string itself in the text."""
        assert all(stops), "an empty stop string would stop everything"
        self.include = include
        self.first_characters = frozenset(stop[0] for stop in stops)
        num_nodes = sum(map(len, stops)) + 1
        numbers = "H" if num_nodes < 1 << 16 else "L"
        self._branches: dict[tuple[int, str], int] = {}
        self._depths = array(numbers, [0])  # characters of each node
        self._fallbacks = array(numbers, bytes(num_nodes * array(numbers).itemsize))  # its longest end that is a node
        self._lengths = array(numbers, bytes(num_nodes * array(numbers).itemsize))  # of the stop it ends with, or 0
        self._children = array(numbers, [0])  # the node that `_next` leads to; 0: none
        self._next = ""
        following = [""]
        parents = [_ROOT]
        for stop in dict.fromkeys(stops):
            node = _ROOT
            for character in stop:
                child = self._children[node] if following[node] == character else self._branches.get((node, character))
                if not child:
                    child = len(following)
                    if following[node]:
                        self._branches[node, character] = child
                    else:
                        following[node], self._children[node] = character, child
                    following.append("")
                    parents.append(node)
                    self._children.append(0)
                    self._depths.append(self._depths[node] + 1)
                node = child
            self._lengths[node] = len(stop)
        self._next = "".join(character or "\0" for character in following)
        self._link(parents)

    def _link(self, parents: list[int]) -> None:
        """Fallbacks of all nodes, those of short ones first."""
        arrived = {child: character for (_, character), child in self._branches.items()}
        for node in sorted(range(1, len(parents)), key=self._depths.__getitem__):
            parent = parents[node]
            if parent != _ROOT:
                character = arrived.get(node) or self._next[parent]
                fallback = self._fallbacks[node] = self.step(self._fallbacks[parent], character)
                self._lengths[node] = self._lengths[node] or self._lengths[fallback]

    def step(self, node: int, character: str) -> int:
        """The longest end of the text that begins a stop, one character on."""
        while True:
            child = self._children[node]
            if child and self._next[node] == character:
                return child
            if self._branches and (branch := self._branches.get((node, character))) is not None:
                return branch
            if node == _ROOT:
                return _ROOT
            node = self._fallbacks[node]

    def depth(self, node: int) -> int:
        """Characters at the end of the text that may become a stop."""
        return self._depths[node]

    def found(self, node: int) -> int:
        """The length of the longest stop that the text ends with; 0: it ends with none."""
        return self._lengths[node]

    def scanner(self) -> StopScanner:
        return StopScanner(self)


class StopScanner:
    """One text and where it is in the automaton."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = _ROOT
        self._held = ""
        self.hit: str | None = None  # the stop that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be sent, and whether a stop was hit; after a hit there is no more text."""
        stops, node = self._stops, self._node
        if node == _ROOT and stops.first_characters.isdisjoint(text):  # most text, and all where there are no stops
            return ("", True) if self.hit is not None else (text, False)
        if self.hit is not None:
            return "", True
        for position, character in enumerate(text, 1):
            node = stops.step(node, character)
            if length := stops.found(node):
                text = self._held + text[:position]
                self._held, self._node, self.hit = "", _ROOT, text[len(text) - length :]
                return text if stops.include else text[: len(text) - length], True
        text = self._held + text
        settled = len(text) - stops.depth(node)
        self._held, self._node = text[settled:], node
        return text[:settled], False

    def flush(self) -> str:
        """The text that was held back for a stop that never came."""
        text, self._held, self._node = self._held, "", _ROOT
        return text
