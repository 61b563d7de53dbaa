"""Whether a pipeline can run: every edge leads to something that is there by then, and carries what its step takes.

What is wrong is told with the step, the edge and, by `ConfigFile.located`, the line. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from penstock.core.config import suggestion
from penstock.core.config_file import ConfigFile
from penstock.core.errors import ConfigError
from penstock.gateway.pipelines.edges import Edge
from penstock.gateway.pipelines.graph import (
    INDEX,
    INPUT,
    INPUT_TYPES,
    ITEM,
    BlockStep,
    BranchStep,
    MapStep,
    ModelStep,
    ParallelStep,
    Pipeline,
    PythonStep,
    Step,
    Task,
    TemplateStep,
    ValueStep,
    max_attempts,
)
from penstock.gateway.pipelines.reader import naming_step, read_pipeline
from penstock.gateway.pipelines.template import Template
from penstock.gateway.pipelines.types import (
    ANY_JSON,
    MESSAGES,
    RANKING,
    TEXT,
    Json,
    Labels,
    ListOf,
    Record,
    Text,
    Type,
    Vector,
    common,
    element_of,
    field_of,
    fits,
)

MAX_ATTEMPTS = 10_000  # at steps, in one run
_INPUT = Record(tuple(INPUT_TYPES.items()))
_INDEX_TYPE = Json({"type": "integer"})

Scope = Mapping[str, Type]


def pipeline_from(file: ConfigFile) -> Pipeline:
    """A pipeline that can be served, as far as its file tells. Raises ConfigError, with the line."""
    with file.located():
        asked, root = read_pipeline(file.values, file.path.parent)
        kinds: dict[str, Type] = {}
        output = _Checker(kinds).check(root, {INPUT: _INPUT})
        if (most := max_attempts(root)) > MAX_ATTEMPTS:
            said = f"one request could come to {most} attempts at steps, more than {MAX_ATTEMPTS}"
            raise ConfigError(f"{said}: lower max_items or retries", param="steps")
        return Pipeline(asked.name, asked.description, root, output, kinds, file)


def check_models(pipeline: Pipeline, models: Iterable[str], pipelines: Iterable[str] = ()) -> None:
    """Whether there are the models that its steps ask: by name, alias or version. Raises ConfigError."""
    known, of_pipelines = set(models), set(pipelines)
    for model, step in pipeline.models.items():
        with pipeline.file.located(), naming_step(step.name, step.where):
            if model in of_pipelines:
                raise ConfigError(f"'{model}' is a pipeline, and a step asks a model", param="model")
            if model not in known:
                raise ConfigError(
                    f"there is no model '{model}' in the configuration{suggestion(model, known)}", param="model"
                )


class _Checker:
    def __init__(self, kinds: dict[str, Type]) -> None:
        """`kinds`: where the type of every step's result is written, by its place in the file."""
        self._kinds = kinds

    def check(self, step: Step, scope: Scope) -> Type:
        """The type of a step's result."""
        with naming_step(step.name, step.where) if step.name else nullcontext():
            made = _CHECKS[type(step)](self, step, scope)
            kind = made
            if step.output is not None and not isinstance(step, PythonStep | ValueStep):
                if not _may_be_declared(step, made) and not fits(made, step.output):
                    raise ConfigError(f"its result is {made}, which is no {step.output}", param="output")
                kind = step.output
            self._kinds[step.where] = kind
        fallback = step.policy.fallback
        if fallback is not None:
            found = self.check(fallback, scope)
            if not fits(found, kind):
                with naming_step(fallback.name, fallback.where):
                    raise ConfigError(f"it stands in for a step that makes {kind}, and makes {found}")
        return kind

    # -- by kind

    def model(self, step: ModelStep, scope: Scope) -> Type:
        self._template(step.system, scope, "system")
        self._template(step.prompt, scope, "prompt")
        if step.messages is not None:
            _expect(_edge_type(step.messages, scope, "messages"), MESSAGES, step.messages, "messages")
        if step.text is not None:
            param = "documents" if step.query is not None else "text"
            kind = _edge_type(step.text, scope, param)
            if step.query is not None:
                _expect(_edge_type(step.query, scope, "query"), TEXT, step.query, "query")
                _expect(kind, ListOf(TEXT), step.text, param)
                return RANKING
            is_list = fits(kind, ListOf(TEXT))
            if not is_list:
                _expect(kind, TEXT, step.text, "text")
            made: Type = Labels() if step.task is Task.CLASSIFICATION else Vector()
            if isinstance(step.output, Labels) and step.task is Task.CLASSIFICATION:
                made = step.output
            return ListOf(made) if is_list else made
        if step.task is Task.TENSORS:
            for name, one in step.tensors.items():
                kind = _edge_type(one.edge, scope, f"inputs.{name}")
                is_text = fits(kind, TEXT) or fits(kind, ListOf(TEXT))
                if is_text != (one.datatype == "BYTES"):
                    said = f"edge '{one.edge}' is {kind}, and the datatype of tensor '{name}' is {one.datatype}"
                    raise ConfigError(said, param=f"inputs.{name}")
            return step.output or ANY_JSON
        if step.choice:
            return Labels(step.choice)
        return Json(step.schema) if step.schema is not None else TEXT

    def template(self, step: TemplateStep, scope: Scope) -> Type:
        self._template(step.template, scope, "template")
        return TEXT

    def constant(self, step: ValueStep, scope: Scope) -> Type:
        assert step.output is not None
        return step.output

    def python(self, step: PythonStep, scope: Scope) -> Type:
        for argument, edge in step.inputs.items():
            _edge_type(edge, scope, f"inputs.{argument}")
        assert step.output is not None
        return step.output

    def block(self, step: BlockStep, scope: Scope) -> Type:
        inner = dict(scope)
        for name, one in zip(step.names, step.steps, strict=True):
            if name in inner:
                with naming_step(one.name, one.where):
                    raise ConfigError(f"there is a step '{name}' already, outside this block")
            inner[name] = self.check(one, inner)
        return inner[step.result]

    def branch(self, step: BranchStep, scope: Scope) -> Type:
        on = _edge_type(step.on, scope, "branch")
        names = on.names if isinstance(on, Labels) else on.among if isinstance(on, Text) else None
        if names is None:
            raise ConfigError(f"edge '{step.on}' is {on}: a branch goes by labels or by a text", param="branch")
        if names and (never := [case for case in step.cases if case not in names]):
            said = f"case '{never[0]}' never comes: '{step.on}' is one of {', '.join(names)}"
            raise ConfigError(said, param=f"cases.{never[0]}")
        missing = [name for name in names if name not in step.cases]
        if step.default is None and (missing or not names):
            what = f"no case for '{missing[0]}'" if missing else f"'{step.on}' may be anything"
            raise ConfigError(f"{what}, and no default", param="cases")
        made: Type | None = None
        for one in step.inner:
            kind = self.check(one, scope)
            found = kind if made is None else common(made, kind)
            if found is None:
                with naming_step(one.name, one.where):
                    raise ConfigError(f"it makes {kind}, where the cases before it make {made}")
            made = found
        assert made is not None
        return made

    def parallel(self, step: ParallelStep, scope: Scope) -> Type:
        return Record(tuple((name, self.check(one, scope)) for name, one in step.arms.items()))

    def map(self, step: MapStep, scope: Scope) -> Type:
        assert step.step is not None
        over = _edge_type(step.over, scope, "map")
        element = element_of(over)
        if element is None:
            raise ConfigError(f"edge '{step.over}' is {over}: a map goes over a list", param="map")
        inner = dict(scope) | {ITEM: element, INDEX: _INDEX_TYPE}
        return ListOf(self.check(step.step, inner))

    # -- edges

    def _template(self, template: Template | None, scope: Scope, param: str) -> None:
        if template is None:
            return
        for one in sorted(template.edges, key=lambda one: (one.line, str(one.edge))):
            edge, place = one.edge, f", line {one.line} of the {param}"
            if edge.name not in dict(one.loops):
                _edge_type(edge, scope, param, place)
                continue
            kind = _loop_type(edge.name, dict(one.loops), scope)
            if kind is None:
                raise ConfigError(f"edge '{edge}'{place}: the loop goes over no list", param=param)
            _check_path(kind, edge.name, edge.path, param, place)


def _loop_type(name: str, loops: Mapping[str, Edge], scope: Scope) -> Type | None:
    """The type of a name that may be a loop's, which stands for the elements of a list."""
    if name not in loops:
        return scope.get(name)
    kind = _loop_type(loops[name].name, {key: over for key, over in loops.items() if key != name}, scope)
    for part in loops[name].path:
        kind = field_of(kind, part) if kind is not None else None
    return element_of(kind) if kind is not None else None


def _may_be_declared(step: Step, made: Type) -> bool:
    """Labels that only the operator knows."""
    return isinstance(step, ModelStep) and step.task is Task.CLASSIFICATION and isinstance(made, Labels)


def _edge_type(edge: Edge, scope: Scope, param: str, place: str = "") -> Type:
    kind = scope.get(edge.name)
    if kind is None:
        raise ConfigError(
            f"edge '{edge}'{place}: nothing before it is called '{edge.name}'{suggestion(edge.name, scope)}",
            param=param,
        )
    return _check_path(kind, edge.name, edge.path, param, place)


def _check_path(kind: Type, name: str, path: tuple[str | int, ...], param: str, place: str) -> Type:
    so_far = name
    for part in path:
        inner = field_of(kind, part)
        if inner is None:
            known = _fields(kind)
            hint = suggestion(str(part), known) or (f"; it has {', '.join(known)}" if known else "")
            whole = str(Edge(name, path))
            raise ConfigError(f"edge '{whole}'{place}: '{so_far}' is {kind} and has no '{part}'{hint}", param=param)
        so_far, kind = str(Edge(so_far, (part,))), inner
    return kind


def _fields(kind: Type) -> list[str]:
    match kind:
        case Record(fields):
            return [name for name, _ in fields]
        case Labels():
            return ["label", "score", "scores"]
        case Json(schema):
            return list(schema.get("properties", {}))
        case _:
            return []


def _expect(kind: Type, wanted: Type, edge: Edge, param: str) -> None:
    if not fits(kind, wanted):
        raise ConfigError(f"edge '{edge}' is {kind}, and {wanted} is wanted", param=param)


_CHECKS: dict[type[Step], Callable[[_Checker, Any, Scope], Type]] = {
    ModelStep: _Checker.model,
    TemplateStep: _Checker.template,
    ValueStep: _Checker.constant,
    PythonStep: _Checker.python,
    BlockStep: _Checker.block,
    BranchStep: _Checker.branch,
    ParallelStep: _Checker.parallel,
    MapStep: _Checker.map,
}
