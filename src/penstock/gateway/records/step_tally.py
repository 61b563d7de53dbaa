"""Counts of the steps of pipelines, by pipeline and step."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.gateway.records.trace import StepVisit
from penstock.observe import gateway_catalog as catalog
from penstock.observe.registry import Registry


class StepTally:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def ended(self, pipeline: str, steps: Iterable[StepVisit]) -> None:
        """The attempts of a run that is over."""
        count, spread = self._registry.count, self._registry.spread
        for step in steps:
            count(catalog.PIPELINE_STEPS, pipeline, step.name, step.outcome).value += 1
            if step.outcome == "ok":
                spread(catalog.PIPELINE_STEP_TIME, pipeline, step.name).observe(step.ended - step.began)
            if step.number > 1:
                count(catalog.PIPELINE_STEP_RETRIES, pipeline, step.name).value += 1
            if step.input_tokens or step.output_tokens:
                count(catalog.PIPELINE_STEP_TOKENS, pipeline, step.name, "input").value += step.input_tokens
                count(catalog.PIPELINE_STEP_TOKENS, pipeline, step.name, "output").value += step.output_tokens
                count(catalog.PIPELINE_STEP_COST, pipeline, step.name).value += step.cost
