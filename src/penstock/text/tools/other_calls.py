"""Calls that are no JSON object: a name and its arguments (Mistral's newer models), or Python (Llama's built-in tools).

Both are read as `CallObject` is; Python is understood at its end, because its arguments have to be made into JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from penstock.text.tools.call_object import ArgumentText, State
from penstock.text.tools.json_scan import Scan

_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")
_MAX_HEAD = 256  # characters
_NAME = re.compile(r"\s*[\w.-]*[ \t]*")
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CALL_END = "</tool_call>"
_CONSTANTS = {"true": True, "false": False, "null": None}


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
        """Names and arguments, of `f(a=1)`, of `f.call(a=1)`, of a list of them or of lines of them; none if it is
        anything else."""
        try:
            lines = ast.parse("".join(self._text).strip()).body
            return [_python_call(call) for line in lines for call in _listed(line)]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return []


class PythonList(PythonText):
    """The same as the whole answer, `[f(a=1)]`: what does not begin so is an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._has_head = False

    def take(self, character: str) -> State:
        self._has_head = self._has_head or character == "("
        is_name = character.isalnum() or character in "_.[ \n"
        return super().take(character) if self._has_head or is_name else State.BROKEN


class PythonBlock(PythonText):
    """The same between marks."""

    close: ClassVar[str]

    def take(self, character: str) -> State:
        super().take(character)
        if character != self.close[-1] or not "".join(self._text[-len(self.close) :]).endswith(self.close):
            return State.OPEN
        del self._text[-len(self.close) :]
        return State.ENDED


class KeyedCall:
    """`get_weather`, and `<arg_key>city</arg_key>` with `<arg_value>Paris</arg_value>` for each argument, to
    `</tool_call>` (GLM). A value is a text where the tool's schema says so, and else JSON if it can be."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.texts: Mapping[str, Collection[str]] = {}  # arguments that are texts, by tool
        self._text = ""  # since the name, or since the last part that was understood
        self._arguments: dict[str, Any] = {}
        self._is_over = False

    def taken(self) -> str:
        return json.dumps(self._arguments, ensure_ascii=False) if self._is_over else ""

    def run(self, text: str, at: int) -> int:
        return at

    def take(self, character: str) -> State:
        if self.name is None:
            return self._take_name(character)
        self._text += character
        if character != ">":
            return State.OPEN
        if argument := _ARGUMENT.fullmatch(self._text):
            self._arguments[argument[1].strip()] = self._value(argument[1].strip(), argument[2])
            self._text = ""
        elif self._text.strip() == _CALL_END:
            self._is_over = True
            return State.ENDED
        return State.OPEN

    def _take_name(self, character: str) -> State:
        if character in "\n<" and self._text.strip():
            self.name = self._text.strip()
            self._text = character
            return State.OPEN
        self._text += character
        return State.OPEN if len(self._text) <= _MAX_HEAD and _NAME.fullmatch(self._text) else State.BROKEN

    def _value(self, key: str, text: str) -> Any:
        if key in self.texts.get(self.name or "", ()):
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def _listed(line: ast.stmt) -> list[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise ValueError("not a call")
    return line.value.elts if isinstance(line.value, ast.List) else [line.value]


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    name = ast.unparse(call.func).removesuffix(".call")
    arguments = {word.arg: ast.literal_eval(_Constants().visit(word.value)) for word in call.keywords}
    if None in arguments:
        raise ValueError("arguments of arguments")
    return name, json.dumps(arguments, ensure_ascii=False)


class _Constants(ast.NodeTransformer):
    """JSON's words for what Python calls otherwise: models mix the two."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
