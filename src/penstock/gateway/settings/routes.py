"""Settings of a model that has versions, or rules instead of replicas.

models:
  smollm2:
    versions:
      v1: {replicas: [http://10.0.0.5:9001], weight: 90}
      v2: {replicas: [http://10.0.0.6:9001], weight: 10}
      v3: {replicas: [http://10.0.0.7:9001], shadow: 0.05}
  support:
    versions:
      v1: {model: smollm2, adapter: support-2026-10, weight: 100}
      v2: {model: smollm2, adapter: support-2026-11}
  triage:
    versions:
      v1: {pipeline: triage-a, weight: 100}
      v2: {pipeline: triage-b}
  auto:
    rules:
      - {name: short, max_prompt_tokens: 500, tools: false, to: smollm2}
    default: big
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.router.routes import Version, pool_of
from penstock.router.rules import Rule, RuleSet, Score

ENTRY_POINTS = "penstock.scores"
VERSION_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class VersionSettings:
    weight: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # its part of the traffic, as against the others'
    shadow: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of what goes to the others, how much it is sent a copy of
    model: str | None = None  # the model, or one version of it, on whose replicas it is; none: it has its own
    adapter: str | None = None  # the LoRA adapter that it is, on these replicas
    pipeline: str | None = None  # the pipeline that it is, by its name, in place of replicas


class DeclaredVersion(NamedTuple):
    settings: VersionSettings
    own: dict[str, Any]  # settings of its pool that are not the model's

    @property
    def has_pool(self) -> bool:
        """Whether it has replicas of its own."""
        return self.settings.model is None and self.settings.pipeline is None


_OF_A_VERSION = frozenset(one.name for one in fields(VersionSettings))


def versions_of(name: str, versions: Mapping[str, Any]) -> dict[str, DeclaredVersion]:
    found = {}
    for version, values in versions.items():
        where = f"models.{name}.versions.{version}"
        if not VERSION_NAME.fullmatch(str(version)) or not isinstance(values, dict):
            raise ConfigError(f"{where}: a version has a name of letters, digits, . _ - and settings", param=where)
        said = {key: value for key, value in values.items() if key in _OF_A_VERSION}
        own = {key: value for key, value in values.items() if key not in said}
        one = found[str(version)] = DeclaredVersion(build(VersionSettings, said, where=f"{where}."), own)
        _check(name, one, where)
    if found and not any(version.settings.weight for version in found.values()):
        raise ConfigError(f"no version of '{name}' has a weight", param=f"models.{name}.versions")
    pipelines = [version for version, one in found.items() if one.settings.pipeline is not None]
    for version, one in found.items():
        if pipelines and one.settings.shadow:
            raise ConfigError(
                f"'{name}' cannot send '{version}' copies: its version '{pipelines[0]}' is a pipeline, and requests "
                "for pipelines are not copied",
                param=f"models.{name}.versions.{version}.shadow",
            )
    return found


def _check(name: str, version: DeclaredVersion, where: str) -> None:
    settings = version.settings
    if settings.pipeline is not None and (settings.model is not None or settings.adapter is not None):
        said = "a version is a pipeline, or it is on a model's replicas: name one of the two"
        raise ConfigError(said, param=f"{where}.pipeline")
    if not version.has_pool and version.own:
        key = next(iter(version.own))
        other = settings.pipeline or settings.model
        said = f"'{key}' is a setting of replicas, and those of this version are for '{other}' to say"
        raise ConfigError(said, param=f"{where}.{key}")
    if settings.model == name:
        said = f"'{name}' cannot be a version of itself: name the version that it shares replicas with, as {name}@v1"
        raise ConfigError(said, param=f"{where}.model")


def routed_versions(
    name: str, versions: Mapping[str, DeclaredVersion], owners: Mapping[str, str]
) -> tuple[Version, ...]:
    """`owners`: the model that each configured adapter is of. An adapter without replicas of its own, and of which
    nothing else is said, is on its owner's."""
    found = []
    for version, (settings, own) in versions.items():
        of = settings.model or ""
        if settings.adapter is not None and not of and not own:
            of = owners.get(settings.adapter, "")
            if of in ("", name):
                where = f"models.{name}.versions.{version}"
                said = f"`model` has to say on whose replicas '{settings.adapter}' is"
                hint = f", as {name}@v1" if of else ": it is in no model's adapters"
                raise ConfigError(said + hint, param=f"{where}.adapter")
        pool = "" if of or settings.pipeline else pool_of(name, version)
        adapter, pipeline = settings.adapter or "", settings.pipeline or ""
        found.append(Version(version, settings.weight, settings.shadow, pool, of, adapter, pipeline))
    return tuple(found)


def adapter_owner(name: str, versions: tuple[Version, ...]) -> str | None:
    """The other model that versions are adapters of; None: there is none."""
    found = sorted({version.of.partition("@")[0] for version in versions if version.adapter and version.of} - {name})
    if len(found) > 1:
        said = f"versions of '{name}' are adapters of {' and '.join(found)}: they have to be of one model"
        raise ConfigError(said, param=f"models.{name}.versions")
    return found[0] if found else None


def rule_set(name: str, rules: list[dict[str, Any]], default: str | None, *, dry_run: bool) -> RuleSet:
    where = f"models.{name}."
    if default is None:
        raise ConfigError(f"'{name}' has rules and no default", param=f"{where}default")
    found = [build(Rule, values, where=f"{where}rules.{index}.") for index, values in enumerate(rules)]
    scores = {rule.score: _score(rule.score) for rule in found if rule.score is not None}
    return RuleSet(found, default, dry_run=dry_run, scores=scores)


def _score(path: str) -> Score:
    """Returns the scorer named by `package.module:function`, or by an entry point."""
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
