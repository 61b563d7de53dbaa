"""SGLang's own source, as it is published: what the gateway adds to a request for two of its servers is what it reads.

Its classes are read and not imported, since importing them takes all that it needs to run."""

from __future__ import annotations

import ast
import json
import typing
from pathlib import Path

import msgspec
import pytest

from penstock.dialects import handover
from tests.peers.peers import python_of

pytestmark = pytest.mark.slow

_CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def source() -> Path:
    [found] = Path(python_of("sglang")).parents[1].glob("lib/python3*/site-packages/sglang/srt")
    return found


def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def fields(found: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    return {
        node.target.id: node
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.parametrize("body", [_CHAT, {"prompt": "Hi"}, {"prompt": [1, 2]}, {"prompt": ["Hi", "there"]}])
def test_rooms_are_in_fields_that_sglang_reads_with_its_types(source: Path, body: dict[str, object]) -> None:
    found = classes(source / "entrypoints/openai/protocol.py")
    written = json.loads(handover.with_room(json.dumps(body).encode(), "10.0.0.1", handover.BOOTSTRAP_PORT, 1 << 62))
    for name in written.keys() - body.keys():
        annotation = ast.unparse(fields(found["PDRoutingFields"])[name].annotation)
        msgspec.convert(written[name], eval(annotation, vars(typing).copy()))
    for request in ("CompletionRequest", "ChatCompletionRequest"):
        assert "PDRoutingFields" in [ast.unparse(base) for base in found[request].bases]


def test_the_bootstrap_port_is_sglangs(source: Path) -> None:
    [group] = classes(source / "arg_groups/fields/disagg.py").values()
    default = fields(group)["disaggregation_bootstrap_port"].value
    assert isinstance(default, ast.Constant)
    assert default.value == handover.BOOTSTRAP_PORT
