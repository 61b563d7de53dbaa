"""Types are described at import: msgspec ends the process where two threads meet a type for the first time at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
BUILTINS = {"Any", "None", "bool", "bytes", "dict", "float", "int", "list", "object", "set", "str", "tuple", "msgspec"}
MADE_LATER = {"core/converter.py", "tensors/wire.py"}  # it has a lock; its types are lists of numbers and of strings
ADVICE = (
    "msgspec describes the type here, perhaps in two threads at once: make a {} at import, as a constant of the module"
)


def has_no_class(expression: ast.expr) -> bool:
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    members = {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)}
    return names <= BUILTINS and members <= {"Raw"}


def is_of_msgspec(function: ast.expr, imported: set[str]) -> bool:
    """`msgspec.convert`, `msgspec.json.decode`, or a name that was imported from there."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in imported | {"msgspec"}


def wrong_calls(source: str, where: str) -> Iterator[str]:
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {
        name.asname or name.name for one in imports if (one.module or "").startswith("msgspec") for name in one.names
    }

    def look(node: ast.AST, *, is_later: bool) -> Iterator[str]:
        if isinstance(node, ast.Call) and is_of_msgspec(node.func, imported):
            word = ast.unparse(node.func).rpartition(".")[2]
            types = [one.value for one in node.keywords if one.arg == "type"]
            types += node.args[1:2] if word == "convert" else node.args[:1] if word == "Decoder" else []
            has_class = any(not has_no_class(one) for one in types)
            if has_class and (word == "decode" or (word == "Decoder" and is_later)):
                yield f"{where}:{node.lineno}: {ADVICE.format('msgspec.json.Decoder')}"
            elif word == "convert":
                yield f"{where}:{node.lineno}: {ADVICE.format('penstock.core.converter.Converter')}"
        inside = is_later or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from look(child, is_later=inside)

    return look(tree, is_later=False)


def may_be_wrong(source: str) -> bool:
    """Most files need not be parsed: they have no such call, or decoders that begin a line alone."""
    if "msgspec" not in source:
        return False
    is_made_in_block = any("Decoder(" in line and line[:1] == " " for line in source.splitlines())
    return (
        is_made_in_block or ("decode(" in source and "type=" in source) or " convert" in source or ".convert(" in source
    )


def test_no_type_is_described_while_threads_run() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        where, source = str(path.relative_to(SOURCE)), path.read_text()
        if where not in MADE_LATER and may_be_wrong(source):
            found += wrong_calls(source, where)
    assert found == []


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("found = msgspec.json.decode(data, type=Tenant)", "msgspec.json.Decoder"),
        ("found = msgspec.msgpack.decode(data, type=list[Tenant] | None)", "msgspec.json.Decoder"),
        ("def read(data): return json.decode(data, type=Tenant)", "msgspec.json.Decoder"),
        ("def read(data): return msgspec.json.Decoder(Tenant).decode(data)", "msgspec.json.Decoder"),
        ("def read(data, kind): return msgspec.json.decode(data, type=kind)", "msgspec.json.Decoder"),
        ("found = msgspec.convert(values, Tenant)", "Converter"),
        ("found = convert(values, type=Tenant)", "Converter"),
    ],
)
def test_the_check_finds_what_is_planted(line: str, advice: str) -> None:
    source = f"import msgspec\nfrom msgspec import convert, json\n{line}\n"
    assert may_be_wrong(source)
    (found,) = wrong_calls(source, "planted.py")
    assert found.startswith("planted.py:3:")
    assert advice in found


@pytest.mark.parametrize(
    "line",
    [
        "decoder = msgspec.json.Decoder(Tenant)",
        "decoders = {'tenant': msgspec.json.Decoder(Tenant)}",
        "def read(data): return msgspec.json.decode(data, type=dict[str, msgspec.Raw])",
        "def read(data): return msgspec.json.Decoder(list[int]).decode(data)",
        "def read(data): return decoder.decode(data)",
        "def read(values): return converter.convert(values)",
        "def read(data): return tokenizer.decode(data, type=Tenant)",
    ],
)
def test_the_check_lets_pass_what_is_safe(line: str) -> None:
    assert list(wrong_calls(f"import msgspec\n{line}\n", "fine.py")) == []
