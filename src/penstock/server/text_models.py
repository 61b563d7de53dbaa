"""Models that take whole texts and answer with numbers: what the routes know of one, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from penstock.api.openai.embeddings import Vectors
from penstock.core.errors import UnsupportedTask
from penstock.engine.client import EngineClient
from penstock.engine.messages import Embed
from penstock.server.served_model import ServedModel
from penstock.server.text_limits import TextLimits

Task = Literal["embeddings", "relevance", "classification"]
# Relevance of two texts: by their vectors, by how likely one makes the other, by a model that reads both.
Relevance = Literal["cosine", "likelihood", "pairs"]


@dataclass(frozen=True)
class Job:
    model: TextModel
    texts: list[list[int]]
    answer: Callable[[Vectors], bytes]  # makes the body from vectors [texts, dimensions]
    scored: list[int] | None = None  # how many of each text's last tokens count; None: vectors are wanted
    types: list[list[int]] | None = field(default=None, repr=False)  # token_type_ids, where two texts are read together
    is_raw: bool = False  # logits are wanted, and no probabilities

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


class Computed(NamedTuple):
    values: Vectors  # [texts, dimensions]: vectors of length one, scores, or probabilities
    device_s: float


class TextModel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> TextLimits: ...

    @property
    def dimensions(self) -> int:
        """Length of a vector."""

    @property
    def relevance(self) -> Relevance: ...

    @property
    def labels(self) -> Sequence[str]:
        """Labels of the classes that it tells apart, in their order."""

    @property
    def num_waiting(self) -> int:
        """Texts that are not answered yet."""

    async def compute(self, request_id: str, job: Job) -> Computed: ...


class TextModels(Protocol):
    def find_text_model(self, name: str, task: Task) -> TextModel:
        """Raises ModelNotFound, UnsupportedTask, EngineUnavailable."""


class EngineTexts:
    """The model of an engine, which embeds and scores."""

    labels: Sequence[str] = ()

    def __init__(self, model: ServedModel, engine: EngineClient) -> None:
        self._model = model
        self._engine = engine

    def find_text_model(self, name: str, task: Task) -> EngineTexts:
        self._model.check_embeds()
        self._model.check_base_name(name)
        if task == "classification":
            raise UnsupportedTask(f"the model '{self._model.name}' has no classes: it is no classifier", param="model")
        return self

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def limits(self) -> TextLimits:
        return self._model.texts

    @property
    def dimensions(self) -> int:
        return self._model.config.hidden_size

    @property
    def relevance(self) -> Relevance:
        return "likelihood" if self._model.generates else "cosine"

    @property
    def num_waiting(self) -> int:
        return self._engine.embeddings.num_texts

    async def compute(self, request_id: str, job: Job) -> Computed:
        answer = await self._engine.embeddings(Embed(request_id, job.texts, job.scored))
        return Computed(np.frombuffer(answer.values, np.float32).reshape(len(job.texts), -1), answer.device_s)
