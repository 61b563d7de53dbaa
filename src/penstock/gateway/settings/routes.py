"""What an operator writes of a model that has versions, or rules instead of replicas.

models:
  smollm2:
    versions:
      v1: {replicas: [http://10.0.0.5:9001], weight: 90}
      v2: {replicas: [http://10.0.0.6:9001], weight: 10}
      v3: {replicas: [http://10.0.0.7:9001], shadow: 0.05}
  auto:
    rules:
      - {name: short, max_prompt_tokens: 500, tools: false, to: smollm2}
    default: big
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.router.rules import Rule, RuleSet, Score

ENTRY_POINTS = "penstock.scores"
_VERSION = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Share:
    weight: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # its part of the traffic, as against the others'
    shadow: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of what goes to the others, how much it is sent a copy of


class Version(NamedTuple):
    share: Share
    own: dict[str, Any]  # settings that are not the model's


def versions_of(name: str, versions: Mapping[str, Any]) -> dict[str, Version]:
    found = {}
    for version, values in versions.items():
        where = f"models.{name}.versions.{version}"
        if not _VERSION.fullmatch(str(version)) or not isinstance(values, dict):
            raise ConfigError(f"{where}: a version has a name of letters, digits, . _ - and settings", param=where)
        share = {key: value for key, value in values.items() if key in ("weight", "shadow")}
        own = {key: value for key, value in values.items() if key not in share}
        found[str(version)] = Version(build(Share, share, where=f"{where}."), own)
    if found and not any(version.share.weight for version in found.values()):
        raise ConfigError(f"no version of '{name}' has a weight", param=f"models.{name}.versions")
    return found


def pool_name(model: str, version: str) -> str:
    return f"{model}@{version}"


def rule_set(name: str, rules: list[dict[str, Any]], default: str | None, *, dry_run: bool) -> RuleSet:
    where = f"models.{name}."
    if default is None:
        raise ConfigError(f"'{name}' has rules and no default", param=f"{where}default")
    found = [build(Rule, values, where=f"{where}rules.{index}.") for index, values in enumerate(rules)]
    scores = {rule.score: _score(rule.score) for rule in found if rule.score is not None}
    return RuleSet(found, default, dry_run=dry_run, scores=scores)


def _score(path: str) -> Score:
    """By `package.module:function`, or by the name of an entry point."""
    module, colon, name = path.partition(":")
    try:
        if colon:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        else:
            (entry,) = entry_points(group=ENTRY_POINTS, name=path)
            found = entry.load()
    except Exception as error:  # whatever an operator's module does when it is imported
        raise ConfigError(f"the scoring function '{path}' cannot be had: {error}", param="score") from None
    if not callable(found):
        raise ConfigError(f"'{path}' is no function", param="score")
    return found
