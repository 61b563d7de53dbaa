"""The settings of a model, in Triton's words, and how they are read: `config.yaml`, or Triton's own `config.pbtxt`.

A key that Triton has and this server does not understand is an error that names it: nothing is silently left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from penstock.core.config import nearest, shown
from penstock.core.converter import Converter
from penstock.core.errors import ConfigError
from penstock.tensors.batcher import BatchingRules, QueuePolicy
from penstock.tensors.text_format import read_text_format

CONFIG_FILES = ("config.yaml", "config.yml", "config.pbtxt")
DEFAULT_BATCH_SIZE = 32  # of a model with a dynamic batch dimension, for which nobody has said one
DEFAULT_QUEUE_SIZE = 1024  # where Triton's queue has no bound
MAX_INSTANCES = 64

Micros = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TensorSettings(_Settings, frozen=True):
    """A tensor of the model, checked against the model's file."""

    name: str
    data_type: str
    dims: list[Annotated[int, Meta(ge=-1)]]
    label_filename: str = ""  # file of an output's labels, one on each line, for the classification extension


class QueuePolicySettings(_Settings, frozen=True):
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    default_timeout_microseconds: Micros = 0
    allow_timeout_override: bool = False
    max_queue_size: Natural = 0

    def policy(self) -> QueuePolicy:
        timeout_s = self.default_timeout_microseconds / 1e6
        return QueuePolicy(
            self.max_queue_size or DEFAULT_QUEUE_SIZE,
            timeout_s or None,
            self.allow_timeout_override,
            self.timeout_action == "REJECT",
        )


class DynamicBatching(_Settings, frozen=True):
    preferred_batch_size: list[Count] = []
    max_queue_delay_microseconds: Micros = 0
    preserve_ordering: bool = False  # with one instance it holds anyway; with several it is not offered
    priority_levels: Natural = 0
    default_priority_level: Natural = 0
    default_queue_policy: QueuePolicySettings = QueuePolicySettings(allow_timeout_override=True)
    priority_queue_policy: dict[str, QueuePolicySettings] = {}


class InstanceGroup(_Settings, frozen=True):
    name: str = ""
    count: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] = 1
    kind: Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU"] = "KIND_AUTO"
    gpus: list[Natural] = []


class LatestVersions(_Settings, frozen=True):
    num_versions: Count = 1


class AllVersions(_Settings, frozen=True):
    pass


class SpecificVersions(_Settings, frozen=True):
    versions: Annotated[list[Count], Meta(min_length=1)]


class VersionPolicy(_Settings, frozen=True):
    """One of the three."""

    latest: LatestVersions | None = None
    all: AllVersions | None = None
    specific: SpecificVersions | None = None


class WarmupInput(_Settings, frozen=True):
    data_type: str
    dims: list[Count] = []
    zero_data: bool = False
    random_data: bool = False


class Warmup(_Settings, frozen=True):
    """A request that each instance executes before the model is ready."""

    name: str = ""
    batch_size: Count = 1
    count: Natural = 1
    inputs: dict[str, WarmupInput] = {}


class ModelSettings(_Settings, frozen=True):
    name: str = ""
    backend: str = ""
    platform: str = ""
    default_model_filename: str = "model.onnx"
    max_batch_size: Natural | None = None
    input: list[TensorSettings] = []
    output: list[TensorSettings] = []
    instance_group: list[InstanceGroup] = []
    dynamic_batching: DynamicBatching | None = None
    version_policy: VersionPolicy = VersionPolicy()
    model_warmup: list[Warmup] = []
    parameters: dict[str, Any] = {}

    @property
    def instances(self) -> list[InstanceGroup]:
        """One group for each instance."""
        groups = self.instance_group or [InstanceGroup()]
        return [group for group in groups for _ in range(group.count)]


_model_settings_converter = Converter(ModelSettings)


def read_settings(path: Path) -> ModelSettings:
    """Raises ConfigError, with the file's name."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        found = read_text_format(text, _LISTS) if path.suffix == ".pbtxt" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return settings_of({} if found is None else found, str(path))


def settings_of(values: object, where: str) -> ModelSettings:
    """Raises ConfigError."""
    try:
        settings = _model_settings_converter.convert(values)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_said(str(error))}") from None
    _check(settings, where)
    return settings


def batching_rules(settings: ModelSettings, max_batch_size: int) -> BatchingRules:
    """`max_batch_size`: 0: the model has no batch dimension, so each request is executed by itself."""
    batching = settings.dynamic_batching or DynamicBatching()
    policies = {int(level): one.policy() for level, one in batching.priority_queue_policy.items()}
    is_batched = max_batch_size > 0 and (settings.dynamic_batching is not None or settings.max_batch_size is None)
    levels = max(1, batching.priority_levels)
    return BatchingRules(
        max_batch_size=max(1, max_batch_size),
        preferred_batch_sizes=tuple(batching.preferred_batch_size),
        max_queue_delay_s=batching.max_queue_delay_microseconds / 1e6,
        priority_levels=levels,
        default_priority_level=batching.default_priority_level or levels,
        policies=policies,
        policy=batching.default_queue_policy.policy(),
        joins=is_batched,
    )


# Fields of config.pbtxt that may be written once and are lists all the same.
_LISTS = frozenset(
    ("input", "output", "dims", "instance_group", "gpus", "preferred_batch_size", "versions", "model_warmup")
)


def _check(settings: ModelSettings, where: str) -> None:
    for name, value in (("backend", settings.backend), ("platform", settings.platform)):
        if value not in ("", "onnxruntime", "onnxruntime_onnx"):
            raise ConfigError(f"{where}: {name} is '{shown(value)}'; only onnxruntime is served", param=name)
    policy = settings.version_policy
    if sum(one is not None for one in (policy.latest, policy.all, policy.specific)) > 1:
        raise ConfigError(f"{where}: version_policy is one of latest, all, specific", param="version_policy")
    if len(settings.instances) > MAX_INSTANCES:
        raise ConfigError(f"{where}: more than {MAX_INSTANCES} instances", param="instance_group")
    for output in settings.output:
        if "/" in output.label_filename or output.label_filename.startswith("."):
            raise ConfigError(f"{where}: label_filename is the name of a file", param="label_filename")
    if "/" in settings.default_model_filename or settings.default_model_filename.startswith("."):
        raise ConfigError(f"{where}: default_model_filename is the name of a file", param="default_model_filename")
    if (batching := settings.dynamic_batching) is None:
        return
    if settings.max_batch_size == 0:
        raise ConfigError(f"{where}: dynamic_batching needs a max_batch_size", param="dynamic_batching")
    most = settings.max_batch_size
    if most is not None and any(size > most for size in batching.preferred_batch_size):
        raise ConfigError(f"{where}: a preferred_batch_size is above max_batch_size", param="preferred_batch_size")
    if batching.preserve_ordering and len(settings.instances) > 1:
        raise ConfigError(
            f"{where}: preserve_ordering is not offered with several instances", param="preserve_ordering"
        )
    if batching.default_priority_level > batching.priority_levels:
        raise ConfigError(f"{where}: default_priority_level is no level", param="default_priority_level")
    for level in batching.priority_queue_policy:
        if not level.isdigit() or not 1 <= int(level) <= batching.priority_levels:
            raise ConfigError(f"{where}: priority_queue_policy: '{shown(level)}' is no level", param=level)


def _said(error: str) -> str:
    """msgspec's words, with the nearest key for one that is unknown."""
    if not error.startswith("Object contains unknown field `"):
        return error
    name = error.split("`")[1]
    known = {field for cls in _Settings.__subclasses__() for field in cls.__struct_fields__}
    hint = nearest(name, known)
    return f"the key '{shown(name)}' is not known" + (f"; did you mean '{hint}'?" if hint else "")
