"""A pipeline as data: steps, and the edges between them. `reader` makes it of a file.

Steps of a block run one after another, in the order of the file; those of `parallel` and the elements of a `map` run
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.config_file import ConfigFile
from penstock.gateway.pipelines.edges import Edge
from penstock.gateway.pipelines.template import Template
from penstock.gateway.pipelines.types import MESSAGES, TEXT, Json, Schema, Type

INPUT = "input"
INPUT_TYPES: Mapping[str, Type] = {"text": TEXT, "messages": MESSAGES, "metadata": Json({"type": "object"})}
ITEM, INDEX = "item", "index"  # of a map, in its step
RESERVED = frozenset((INPUT, ITEM, INDEX, "value"))


@dataclass(frozen=True)
class Policy:
    """Timeout, retries and fallback of a step."""

    timeout_s: float | None = None  # of one attempt
    retries: int = 0  # attempts after the first
    fallback: Step | None = None  # runs when every attempt has failed; its result is the step's


@dataclass(frozen=True)
class Step:
    name: str  # the whole path: route.de.answer
    policy: Policy
    output: Type | None  # as the file declares it; None: it follows from the kind of the step
    where: str  # in the file, for errors: steps.route.branch.cases.de

    @property
    def kind(self) -> str:
        raise NotImplementedError

    @property
    def inner(self) -> tuple[Step, ...]:
        """Steps that run as parts of this one."""
        return ()

    @property
    def edges(self) -> Iterator[Edge]:
        """Those that lead to this step itself; some stand for elements of a template's loop."""
        for value in vars(self).values():
            for one in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(one, Edge):
                    yield one
                elif isinstance(one, TensorInput):
                    yield one.edge
                elif isinstance(one, Template):
                    yield from (inside.edge for inside in one.edges)

    def walk(self) -> Iterator[Step]:
        """This step, those inside it, and the fallbacks of all of them."""
        yield self
        for one in self.inner:
            yield from one.walk()
        if self.policy.fallback is not None:
            yield from self.policy.fallback.walk()


class Task(StrEnum):
    """Task that a model step asks of its model."""

    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDINGS = "embeddings"
    CLASSIFICATION = "classification"
    RERANK = "rerank"
    TENSORS = "tensors"

    @property
    def generates(self) -> bool:
        return self in (Task.CHAT, Task.COMPLETION)


@dataclass(frozen=True)
class TensorInput:
    """A tensor that a model step sends."""

    edge: Edge
    datatype: str = "BYTES"  # of the Open Inference Protocol; BYTES are texts
    shape: tuple[int, ...] = ()  # empty: a batch of one: [1, …] with the lengths of the value


@dataclass(frozen=True)
class ModelStep(Step):
    model: str = ""
    task: Task = Task.CHAT
    system: Template | None = None
    prompt: Template | None = None
    messages: Edge | None = None
    text: Edge | None = None  # embeddings, classification: a text or a list of texts; rerank: the documents
    query: Edge | None = None  # rerank: the text that documents are ranked by
    choice: tuple[str, ...] = ()  # guided: the answer is one of these
    schema: Schema | None = None  # guided: it is JSON by this schema
    parameters: Mapping[str, Any] = field(default_factory=dict)  # sent with each request
    forward: tuple[str, ...] | None = None  # fields of the client's request that are sent too; None: by default
    tensors: Mapping[str, TensorInput] = field(default_factory=dict)  # by the name of the model's input
    tensor: str | None = None  # the output that is the result; None: all of them, by name

    @property
    def kind(self) -> str:
        return "model"


@dataclass(frozen=True)
class TemplateStep(Step):
    """Text made of a template."""

    template: Template = field(default_factory=lambda: Template("", frozenset()))

    @property
    def kind(self) -> str:
        return "template"


@dataclass(frozen=True)
class ValueStep(Step):
    value: Any = None

    @property
    def kind(self) -> str:
        return "value"


@dataclass(frozen=True)
class EntryPoint:
    """A function in a file of the operator's."""

    file: Path
    function: str


@dataclass(frozen=True)
class PythonLimits:
    """Limits of the processes that run the function of one step."""

    processes: int = 1
    queue: int = 32  # calls that wait for a process; one more is refused
    memory_mib: int = 512
    env: tuple[str, ...] = ()  # variables of the gateway's environment that the function sees


@dataclass(frozen=True)
class PythonStep(Step):
    entry: EntryPoint = field(default_factory=lambda: EntryPoint(Path(), ""))
    inputs: Mapping[str, Edge] = field(default_factory=dict)  # by the name of the argument
    limits: PythonLimits = PythonLimits()

    @property
    def kind(self) -> str:
        return "python"


@dataclass(frozen=True)
class BlockStep(Step):
    """Steps that run one after another; the result is that of one of them."""

    steps: tuple[Step, ...] = ()
    names: tuple[str, ...] = ()  # by which later ones see them
    result: str = ""

    @property
    def kind(self) -> str:
        return "steps"

    @property
    def inner(self) -> tuple[Step, ...]:
        return self.steps


@dataclass(frozen=True)
class BranchStep(Step):
    on: Edge = field(default_factory=lambda: Edge(""))
    cases: Mapping[str, Step] = field(default_factory=dict)
    default: Step | None = None

    @property
    def kind(self) -> str:
        return "branch"

    @property
    def inner(self) -> tuple[Step, ...]:
        return (*self.cases.values(), *((self.default,) if self.default is not None else ()))


@dataclass(frozen=True)
class ParallelStep(Step):
    arms: Mapping[str, Step] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "parallel"

    @property
    def inner(self) -> tuple[Step, ...]:
        return tuple(self.arms.values())


@dataclass(frozen=True)
class MapStep(Step):
    over: Edge = field(default_factory=lambda: Edge(""))
    step: Step | None = None
    at_once: int = 8  # elements that are worked on at a time
    max_items: int = 64  # a longer list is an error

    @property
    def kind(self) -> str:
        return "map"

    @property
    def inner(self) -> tuple[Step, ...]:
        return (self.step,) if self.step is not None else ()


@dataclass(frozen=True)
class Pipeline:
    name: str
    description: str
    root: BlockStep
    output: Type  # of the whole
    kinds: Mapping[str, Type]  # of the result of each step, by its `where`
    file: ConfigFile  # with its lines

    @property
    def models(self) -> dict[str, ModelStep]:
        """The models that are asked, each with the first step that does."""
        found: dict[str, ModelStep] = {}
        for step in self.root.walk():
            if isinstance(step, ModelStep):
                found.setdefault(step.model, step)
        return found

    @cached_property
    def reads_messages(self) -> bool:
        """Whether a step sees the client's messages as they are, and not the text of the last one alone."""
        edges = (edge for step in self.root.walk() for edge in step.edges)
        return any(edge.name == INPUT and edge.path[:1] in ((), ("messages",)) for edge in edges)

    @property
    def python_steps(self) -> list[PythonStep]:
        return [step for step in self.root.walk() if isinstance(step, PythonStep)]


def max_attempts(step: Step) -> int:
    """The most attempts at steps, this one's and those inside it, that one run of it can come to."""
    inside = sum(max_attempts(one) for one in step.inner)
    if isinstance(step, BranchStep):
        inside = max(map(max_attempts, step.inner), default=0)
    elif isinstance(step, MapStep):
        inside *= step.max_items
    fallback = max_attempts(step.policy.fallback) if step.policy.fallback is not None else 0
    return (step.policy.retries + 1) * (1 + inside) + fallback
