"""From a pipeline's file, as plain values, to its graph. What edges carry is for `checker` to say.

name: support
steps:
  language: {python: steps.py:language, inputs: {text: input.text}, output: {labels: [de, en]}}
  answer: {model: smollm2, messages: input.messages, system: "Answer in {{ language }}."}

Errors name the step, and their `param` is the setting's whole name, which `ConfigFile.located` turns into a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.core.config import build, suggestion
from penstock.core.errors import ConfigError
from penstock.gateway.pipelines import types
from penstock.gateway.pipelines.edges import Edge
from penstock.gateway.pipelines.graph import (
    RESERVED,
    BlockStep,
    BranchStep,
    EntryPoint,
    MapStep,
    ModelStep,
    ParallelStep,
    Policy,
    PythonLimits,
    PythonStep,
    Step,
    Task,
    TemplateStep,
    TensorInput,
    ValueStep,
)
from penstock.gateway.pipelines.template import Template, parse
from penstock.gateway.pipelines.types import Type, read_value, type_of_schema

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_EDGE = re.compile(r"([a-z][a-z0-9_]*)((?:\.[A-Za-z_][A-Za-z0-9_]*|\[\d{1,6}\])*)")
_PART = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[(\d+)\]")
_MAX_DEPTH = 16  # of steps in steps
_MAX_STEPS = 1000  # of a pipeline
PYTHON_TIMEOUT_S = 30.0  # of a Python step that says nothing else: its process is killed then
_MAX_INNER = 64  # of one block, branch or parallel

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Retries = Annotated[int, Meta(ge=0, le=5)]


@dataclass(frozen=True)
class PipelineFile:
    """Settings of a pipeline's file beside its steps."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")]
    steps: dict[str, Any]
    description: str = ""
    output: str | None = None  # the step whose result is the answer; none: the last
    timeout_s: Seconds = 120.0  # of the whole


@dataclass(frozen=True)
class _Common:
    timeout_s: Seconds | None = None
    retries: Retries = 0
    fallback: dict[str, Any] | None = None
    output: str | dict[str, Any] | None = None


@dataclass(frozen=True)
class _TensorSpec:
    value: str
    datatype: Literal[
        "BYTES", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64"
    ] = "BYTES"
    shape: Annotated[list[Annotated[int, Meta(ge=1, le=1 << 20)]], Meta(max_length=8)] = field(default_factory=list)


@dataclass(frozen=True)
class _ModelSpec(_Common):
    model: Annotated[str, Meta(min_length=1, max_length=256)] = ""
    task: Literal["chat", "completion", "embeddings", "classification", "rerank", "tensors"] = "chat"
    system: str | None = None
    prompt: str | None = None
    messages: str | None = None
    text: str | None = None
    query: str | None = None
    documents: str | None = None
    choice: Annotated[list[str], Meta(max_length=1000)] = field(default_factory=list)
    schema: dict[str, Any] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    forward: list[str] | None = None
    inputs: dict[str, _TensorSpec] = field(default_factory=dict)
    tensor: str | None = None


@dataclass(frozen=True)
class _TemplateSpec(_Common):
    template: str = ""


@dataclass(frozen=True)
class _ValueSpec(_Common):
    value: Any = None


@dataclass(frozen=True)
class _PythonSpec(_Common):
    python: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    queue: Annotated[int, Meta(ge=0, le=10_000)] = 32
    memory_mib: Annotated[int, Meta(ge=64, le=1 << 20)] = 512
    env: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _BlockSpec(_Common):
    steps: dict[str, Any] = field(default_factory=dict)
    result: str | None = None


@dataclass(frozen=True)
class _BranchSpec(_Common):
    branch: str = ""
    cases: dict[str, Any] = field(default_factory=dict)
    default: dict[str, Any] | None = None


@dataclass(frozen=True)
class _ParallelSpec(_Common):
    parallel: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _MapSpec(_Common):
    map: str = ""
    step: dict[str, Any] = field(default_factory=dict)
    at_once: Annotated[int, Meta(ge=1, le=256)] = 8
    max_items: Annotated[int, Meta(ge=1, le=10_000)] = 64


_SPECS: dict[str, type[_Common]] = {
    "model": _ModelSpec,
    "template": _TemplateSpec,
    "value": _ValueSpec,
    "python": _PythonSpec,
    "branch": _BranchSpec,
    "parallel": _ParallelSpec,
    "map": _MapSpec,
    "steps": _BlockSpec,
}
# Keys of a model step that are for some tasks only: those that each takes, and those of which it needs one.
_KEYS: dict[Task, tuple[frozenset[str], tuple[str, ...]]] = {
    Task.CHAT: (frozenset(("system", "prompt", "messages", "choice", "schema", "forward")), ("messages", "prompt")),
    Task.COMPLETION: (frozenset(("prompt", "choice", "schema", "forward")), ("prompt",)),
    Task.EMBEDDINGS: (frozenset(("text", "forward")), ("text",)),
    Task.CLASSIFICATION: (frozenset(("text", "forward")), ("text",)),
    Task.RERANK: (frozenset(("query", "documents", "forward")), ("query",)),
    Task.TENSORS: (frozenset(("inputs", "tensor")), ("inputs",)),
}
_TASK_KEYS = sorted(frozenset.union(*(takes for takes, _ in _KEYS.values())))
# What only the gateway sets in a request of a step.
_OWN_FIELDS = frozenset(
    ("model", "messages", "prompt", "input", "query", "documents", "stream", "stream_options", "n", "best_of")
)


def read_pipeline(values: Mapping[str, Any], directory: Path) -> tuple[PipelineFile, BlockStep]:
    """`directory`: of the file, where those of Python steps are looked for. Raises ConfigError."""
    file = build(PipelineFile, values)
    policy = Policy(timeout_s=file.timeout_s)
    reader = _Reader(directory)
    return file, reader.block("", policy, file.steps, file.output, None, where="", result_key="output")


@contextmanager
def naming_step(name: str, where: str) -> Iterator[None]:
    """Has an error from inside name the step, and the setting that it is about."""
    try:
        yield
    except ConfigError as error:
        if not error.message.startswith("step '"):
            error.message = f"step '{name}': {error.message}"
        param = error.param or ""
        if not param.startswith(where):
            error.param = f"{where}.{param}".rstrip(".")
        raise ConfigError(error.message, param=error.param) from None


class _Reader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_steps = 0

    def step(self, name: str, values: object, where: str, depth: int) -> Step:
        with naming_step(name, where):
            if not isinstance(values, Mapping):
                raise ConfigError("a step is a mapping: model, template, python, branch, parallel, map, steps or value")
            if depth > _MAX_DEPTH:
                raise ConfigError(f"steps are nested more than {_MAX_DEPTH} times")
            self._num_steps += 1
            if self._num_steps > _MAX_STEPS:
                raise ConfigError(f"there are more than {_MAX_STEPS} steps")
            kinds = [kind for kind in _SPECS if kind in values]
            if len(kinds) != 1:
                raise ConfigError(_wrong_kind(kinds, values))
            spec = build(_SPECS[kinds[0]], values)
            output = read_type(spec.output) if spec.output is not None else None
            fallback = None
            if spec.fallback is not None:
                fallback = self.step(f"{name}.fallback", spec.fallback, f"{where}.fallback", depth + 1)
            make = partial(getattr(self, f"_{kinds[0]}"), depth=depth)
            found = make(name, Policy(spec.timeout_s, spec.retries, fallback), output, where, spec)
            assert isinstance(found, Step)
            return found

    def block(
        self,
        name: str,
        policy: Policy,
        steps: Mapping[str, Any],
        result: str | None,
        output: Type | None,
        *,
        where: str,
        result_key: str = "result",
        depth: int = 0,
    ) -> BlockStep:
        prefix = f"{where}." if where else ""
        if not 1 <= len(steps) <= _MAX_INNER:
            raise ConfigError(f"there are 1 to {_MAX_INNER} steps, not {len(steps)}", param=f"{prefix}steps")
        for one in steps:
            _check_name(one, f"{prefix}steps.{one}")
        inner = self._inner(name, steps, f"{prefix}steps", depth)
        chosen = result if result is not None else next(reversed(inner))
        if chosen not in inner:
            raise ConfigError(
                f"{result_key}: there is no step '{chosen}'{suggestion(chosen, inner)}", param=f"{prefix}{result_key}"
            )
        return BlockStep(name, policy, output, where, tuple(inner.values()), tuple(inner), chosen)

    def _inner(self, name: str, steps: Mapping[str, Any], where: str, depth: int) -> dict[str, Step]:
        prefix = f"{name}." if name else ""
        return {one: self.step(f"{prefix}{one}", spec, f"{where}.{one}", depth + 1) for one, spec in steps.items()}

    def _steps(self, name: str, policy: Policy, output: Type | None, where: str, spec: _BlockSpec, depth: int) -> Step:
        return self.block(name, policy, spec.steps, spec.result, output, where=where, depth=depth)

    def _model(self, name: str, policy: Policy, output: Type | None, where: str, spec: _ModelSpec, depth: int) -> Step:
        task = Task(spec.task)
        takes, needs = _KEYS[task]
        for key in _TASK_KEYS:
            if getattr(spec, key) not in (None, [], {}) and key not in takes:
                raise ConfigError(f"'{key}' is not for {task}", param=key)
        if not any(getattr(spec, key) not in (None, {}) for key in needs):
            raise ConfigError(f"{task} needs {' or '.join(needs)}", param="model")
        if task is Task.RERANK and spec.documents is None:
            raise ConfigError(f"{task} needs documents: a list of texts", param="model")
        if task is Task.TENSORS:
            return self._tensors(name, policy, output, where, spec)
        if spec.choice and spec.schema is not None:
            raise ConfigError("an answer is one of a choice, or by a schema, not both", param="choice")
        if spec.schema is not None:
            with _about("schema"):
                types.check_schema(spec.schema)
        for key in spec.parameters.keys() & _OWN_FIELDS:
            raise ConfigError(f"'{key}' is set by the step itself, not by its parameters", param=f"parameters.{key}")
        for key in set(spec.forward or ()) & _OWN_FIELDS:
            raise ConfigError(f"'{key}' is set by the step itself, not by the client", param="forward")
        return ModelStep(
            name,
            policy,
            output,
            where,
            spec.model,
            task,
            _template(spec.system, "system"),
            _template(spec.prompt, "prompt"),
            _edge(spec.messages, "messages"),
            _edge(spec.text, "text") or _edge(spec.documents, "documents"),
            _edge(spec.query, "query"),
            tuple(spec.choice),
            spec.schema,
            spec.parameters,
            None if spec.forward is None else tuple(spec.forward),
        )

    def _tensors(self, name: str, policy: Policy, output: Type | None, where: str, spec: _ModelSpec) -> Step:
        if len(spec.inputs) > _MAX_INNER:
            raise ConfigError(f"a model of tensors has 1 to {_MAX_INNER} inputs", param="inputs")
        if isinstance(output, types.Labels) and not output.names:
            raise ConfigError("a tensor has no names for labels: output is {labels: [a, b]}", param="output")
        if spec.tensor is None and output is not None and not isinstance(output, types.Json):
            raise ConfigError(f"'tensor' says which of the model's outputs is the {output}", param="model")
        inputs = {}
        for one, said in spec.inputs.items():
            edge = _edge(said.value, f"inputs.{one}.value")
            assert edge is not None
            inputs[one] = TensorInput(edge, said.datatype, tuple(said.shape))
        return ModelStep(
            name,
            policy,
            output,
            where,
            spec.model,
            Task.TENSORS,
            parameters=spec.parameters,
            tensors=inputs,
            tensor=spec.tensor,
        )

    def _template(
        self, name: str, policy: Policy, output: Type | None, where: str, spec: _TemplateSpec, depth: int
    ) -> Step:
        found = _template(spec.template, "template")
        assert found is not None
        return TemplateStep(name, policy, output, where, found)

    def _value(self, name: str, policy: Policy, output: Type | None, where: str, spec: _ValueSpec, depth: int) -> Step:
        kind = output or (types.TEXT if isinstance(spec.value, str) else types.ANY_JSON)
        value, problem = read_value(spec.value, kind)
        if problem is not None:
            raise ConfigError(f"the value is no {kind}: {problem}", param="value")
        return ValueStep(name, policy, kind, where, value)

    def _python(
        self, name: str, policy: Policy, output: Type | None, where: str, spec: _PythonSpec, depth: int
    ) -> Step:
        if output is None:
            raise ConfigError("a Python step declares its output: text, labels, vector, {json: …} or {list: …}")
        file, colon, function = spec.python.rpartition(":")
        if not colon or not function.isidentifier():
            raise ConfigError("a Python step is FILE.py:FUNCTION", param="python")
        path = self._directory / file
        inputs = {argument: _edge(path_of, f"inputs.{argument}") for argument, path_of in spec.inputs.items()}
        with _about("python"):
            check_function(path, function, tuple(inputs))
        limits = PythonLimits(spec.processes, spec.queue, spec.memory_mib, tuple(spec.env))
        edges = {argument: edge for argument, edge in inputs.items() if edge is not None}
        if policy.timeout_s is None:
            policy = replace(policy, timeout_s=PYTHON_TIMEOUT_S)
        return PythonStep(name, policy, output, where, EntryPoint(path.absolute(), function), edges, limits)

    def _branch(
        self, name: str, policy: Policy, output: Type | None, where: str, spec: _BranchSpec, depth: int
    ) -> Step:
        if not 1 <= len(spec.cases) <= _MAX_INNER:
            raise ConfigError(f"a branch has 1 to {_MAX_INNER} cases", param="cases")
        cases = {
            str(case): self.step(f"{name}.{case}", values, f"{where}.cases.{case}", depth + 1)
            for case, values in spec.cases.items()
        }
        default = None
        if spec.default is not None:
            default = self.step(f"{name}.default", spec.default, f"{where}.default", depth + 1)
        on = _edge(spec.branch, "branch")
        assert on is not None
        return BranchStep(name, policy, output, where, on, cases, default)

    def _parallel(
        self, name: str, policy: Policy, output: Type | None, where: str, spec: _ParallelSpec, depth: int
    ) -> Step:
        if not 1 <= len(spec.parallel) <= _MAX_INNER:
            raise ConfigError(f"parallel has 1 to {_MAX_INNER} steps", param="parallel")
        for one in spec.parallel:
            _check_name(one, f"{where}.parallel.{one}")
        return ParallelStep(name, policy, output, where, self._inner(name, spec.parallel, f"{where}.parallel", depth))

    def _map(self, name: str, policy: Policy, output: Type | None, where: str, spec: _MapSpec, depth: int) -> Step:
        if not spec.step:
            raise ConfigError("a map has a step, which runs for each element", param="map")
        over = _edge(spec.map, "map")
        assert over is not None
        step = self.step(f"{name}.step", spec.step, f"{where}.step", depth + 1)
        return MapStep(name, policy, output, where, over, step, spec.at_once, spec.max_items)


def _wrong_kind(kinds: list[str], values: Mapping[str, Any]) -> str:
    if kinds:
        return f"a step is one thing, not {' and '.join(kinds)}"
    known = {one.name for spec in _SPECS.values() for one in fields(spec)}
    hints = [hint for key in values if key not in known and (hint := suggestion(str(key), _SPECS))]
    return f"it says nothing of what to run: one of {', '.join(_SPECS)}{hints[0] if hints else ''}"


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        said = f"'{name}' is no name for a step: lower-case letters, digits and _, beginning with a letter"
        raise ConfigError(said, param=where)
    if name in RESERVED:
        raise ConfigError(f"'{name}' is no name for a step: it means something else in edges", param=where)


@contextmanager
def _about(param: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.message, param=param) from None


def _template(source: str | None, param: str) -> Template | None:
    if source is None:
        return None
    with _about(param):
        return parse(source)


def _edge(path: str | None, param: str) -> Edge | None:
    """An edge, from its path."""
    if path is None:
        return None
    found = _EDGE.fullmatch(path.strip())
    if found is None:
        raise ConfigError(f"edge '{path[:80]}': a path is NAME, NAME.FIELD or NAME[0]", param=param)
    parts = tuple(one[1] if one[1] is not None else int(one[2]) for one in _PART.finditer(found[2]))
    return Edge(found[1], parts)


_PLAIN_TYPES: dict[str, Type] = {
    "text": types.TEXT,
    "labels": types.ANY_LABELS,
    "vector": types.VECTOR,
    "json": types.ANY_JSON,
}


def read_type(said: object) -> Type:
    """A type as a file says it: text, labels, vector, json; {labels: [a, b]}, {json: SCHEMA}, {list: TYPE}, {text:
    [a, b]}. Raises ConfigError."""
    if isinstance(said, str):
        if said in _PLAIN_TYPES:
            return _PLAIN_TYPES[said]
        raise ConfigError(f"'{said[:40]}' is no type{suggestion(said, (*_PLAIN_TYPES, 'list'))}", param="output")
    if isinstance(said, Mapping) and len(said) == 1:
        ((kind, of),) = said.items()
        reader = _TYPE_READERS.get(kind)
        if reader is not None:
            with _about("output"):
                return reader(of)
    names = ", ".join(_PLAIN_TYPES)
    raise ConfigError(f"a type is {names}, or one of labels, text, json and list with what it holds", param="output")


def _names(of: object) -> tuple[str, ...]:
    if not isinstance(of, list) or not of or not all(isinstance(one, str) for one in of):
        raise ConfigError("labels, or the texts that are possible, are a list of texts")
    return tuple(of)


def _json_type(of: object) -> Type:
    types.check_schema(of)
    assert isinstance(of, Mapping)
    found = type_of_schema(of)
    return found if isinstance(found, types.Json) else types.Json(of)


_TYPE_READERS: dict[str, Callable[[object], Type]] = {
    "labels": lambda of: types.Labels(_names(of)),
    "text": lambda of: types.Text(_names(of)),
    "json": _json_type,
    "list": lambda of: types.ListOf(read_type(of)),
}


def check_function(path: Path, function: str, arguments: tuple[str, ...]) -> None:
    """Whether the file has such a function, which takes these arguments; nothing in it is run. Raises ConfigError."""
    try:
        tree = ast.parse(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from None
    named = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = next((one for one in named if one.name == function), None)
    if found is None:
        raise ConfigError(
            f"{path.name} has no function '{function}'{suggestion(function, [one.name for one in named])}"
        )
    if isinstance(found, ast.AsyncFunctionDef):
        raise ConfigError(f"'{function}' is async: a step's process calls one plain function at a time")
    own = found.args
    known = [one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    optional = known[len(own.posonlyargs) + len(own.args) - len(own.defaults) : len(own.posonlyargs) + len(own.args)]
    optional += [one.arg for one, value in zip(own.kwonlyargs, own.kw_defaults, strict=True) if value is not None]
    if own.posonlyargs:
        raise ConfigError(f"'{function}' has arguments without names, and inputs have names")
    for one in arguments:
        if one not in known and own.kwarg is None:
            raise ConfigError(f"'{function}' has no argument '{one}'{suggestion(one, known)}")
    if missing := [one for one in known if one not in arguments and one not in optional]:
        raise ConfigError(f"'{function}' needs an input '{missing[0]}'")
