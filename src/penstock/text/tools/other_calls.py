"""Calls that are no JSON object: a name and its arguments (Mistral's newer models), or Python (Llama's built-in tools).

Both are read as `CallObject` is; Python is understood at its end, because its arguments have to be made into JSON.
"""

from __future__ import annotations

import ast
import json
import re

from penstock.text.tools.call_object import ArgumentText, State
from penstock.text.tools.json_scan import Scan

_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")
_MAX_HEAD = 256  # characters


class NamedCall:
    """`get_weather[ARGS]{"city": "Paris"}`, with or without `[CALL_ID]…` and `[ARGS]`."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._head = ""
        self._arguments = ArgumentText()

    def taken(self) -> str:
        return self._arguments.taken() if self.name is not None else ""

    def run(self, text: str, at: int) -> int:
        return self._arguments.run(text, at)

    def take(self, character: str) -> State:
        if self.name is None:
            if character != "{":
                self._head += character
                return State.OPEN if len(self._head) <= _MAX_HEAD else State.BROKEN
            head = _HEAD.fullmatch(self._head)
            if head is None:
                return State.BROKEN
            self.name = head[1]
        match self._arguments.take(character):
            case Scan.MORE:
                return State.OPEN
            case Scan.LAST:
                return State.ENDED
            case _:
                return State.BROKEN


class PythonText:
    """Everything to the end of the answer."""

    name = None

    def __init__(self) -> None:
        self._text: list[str] = []

    def taken(self) -> str:
        return ""

    def run(self, text: str, at: int) -> int:
        return at

    def take(self, character: str) -> State:
        self._text.append(character)
        return State.OPEN

    def calls(self) -> list[tuple[str, str]]:
        """Names and arguments, of `f(a=1)`, of `f.call(a=1)` or of a list of them; none if it is anything else."""
        try:
            expression = ast.parse("".join(self._text).strip(), mode="eval").body
            found = expression.elts if isinstance(expression, ast.List) else [expression]
            return [_python_call(call) for call in found]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return []


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    name = ast.unparse(call.func).removesuffix(".call")
    arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    if None in arguments:
        raise ValueError("arguments of arguments")
    return name, json.dumps(arguments, ensure_ascii=False)
