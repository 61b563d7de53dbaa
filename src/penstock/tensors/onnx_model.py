"""A model in ONNX Runtime: its file, what goes in and comes out, and sessions, one for each instance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from penstock.core.config import shown
from penstock.core.errors import ConfigError, InvalidRequest, ModelCorrupt, ModelUnsupported
from penstock.tensors.datatypes import NUMPY, Array, in_settings, of_onnx
from penstock.tensors.model_settings import DEFAULT_BATCH_SIZE, InstanceGroup, ModelSettings, TensorSettings
from penstock.tensors.signature import Signature, TensorSpec

try:
    import onnxruntime as ort
except ImportError as missing:
    raise ConfigError(f"ONNX models need the extra penstock[onnx]: {missing}", param="model") from None

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_PARAMETERS = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode", "session.intra_op.allow_spinning")


class Place(NamedTuple):
    """Device and threads of instances whose settings do not name them."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None  # shared by all instances of a version; None: as many as there are cores


class Session(Protocol):
    """A model on a device, for one thread."""

    device: str

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Raises InvalidRequest for values that the model does not take."""


class OnnxModel:
    """One version of a model. Raises ModelCorrupt, ModelUnsupported, ConfigError."""

    def __init__(self, path: Path, settings: ModelSettings, place: Place = Place()) -> None:  # noqa: B008 (a tuple)
        self.path = path
        self.settings = settings
        self._place = place
        first = self._open(settings.instances[0])
        self._first: OnnxSession | None = first
        self.signature = _signature(first.session, settings, path)

    def sessions(self) -> list[Session]:
        """A session for each instance that the settings name."""
        first, self._first = self._first or self._open(self.settings.instances[0]), None
        return [first, *(self._open(group) for group in self.settings.instances[1:])]

    def _open(self, group: InstanceGroup) -> OnnxSession:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors: they are raised besides
        options.intra_op_num_threads = _threads(self.settings, self._place)
        options.inter_op_num_threads = 1
        # Threads that spin between two batches take cores from the server and from other instances.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = _providers(group, self._place)
        try:
            session = ort.InferenceSession(str(self.path), options, providers=providers)
        except Exception as error:  # ONNX Runtime's errors have no common class but this
            raise _unreadable(self.path, error) from None
        return OnnxSession(session)


class OnnxSession:
    def __init__(self, session: Any) -> None:
        self.session = session
        self.device = "gpu" if _CUDA in session.get_providers() else "cpu"
        self._texts = [one.name for one in session.get_inputs() if one.type == "tensor(string)"]

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        given = dict(inputs)
        for name in self._texts:
            given[name] = np.array([_text(name, one) for one in given[name].flat], object).reshape(given[name].shape)
        try:
            found: list[Array] = self.session.run(list(outputs), given)
        except Exception as error:  # see above
            if type(error).__name__ == "InvalidArgument":
                raise InvalidRequest(f"the model does not take these values: {shown(_first_line(error))}") from None
            raise
        return [_bytes(one) if one.dtype == object else one for one in found]


def _signature(session: Any, settings: ModelSettings, path: Path) -> Signature:
    inputs, outputs = session.get_inputs(), session.get_outputs()
    for one in (*inputs, *outputs):
        if of_onnx(one.type) is None:
            raise ModelUnsupported(f"{path}: '{one.name}' is a {one.type}, which cannot be sent")
    most = _max_batch_size(inputs, outputs, settings, path)
    return Signature(
        _specs(inputs, settings.input, most, f"{path}: input"),
        _specs(outputs, settings.output, most, f"{path}: output"),
        most,
    )


def _max_batch_size(inputs: Any, outputs: Any, settings: ModelSettings, path: Path) -> int:
    """0: there is no batch dimension. Unless settings say, a first dimension without a size is one."""
    free = [bool(one.shape) and not isinstance(one.shape[0], int) for one in (*inputs, *outputs)]
    if settings.max_batch_size is None:
        return DEFAULT_BATCH_SIZE if all(free) else 0
    if settings.max_batch_size and not all(free):
        said = f"{path}: max_batch_size is {settings.max_batch_size}, and the first dimension of the model is fixed"
        raise ConfigError(said, param="max_batch_size")
    return settings.max_batch_size


def _specs(found: Any, named: Sequence[TensorSettings], max_batch_size: int, where: str) -> tuple[TensorSpec, ...]:
    """The tensors of the model's file, narrowed by those that the settings name."""
    specs = {}
    for one in found:
        dims = tuple(size if isinstance(size, int) else -1 for size in one.shape)
        specs[one.name] = TensorSpec(one.name, of_onnx(one.type) or "", dims[1:] if max_batch_size else dims)
    for setting in named:
        spec = specs.get(setting.name)
        if spec is None:
            raise ConfigError(f"{where}: the model has no '{shown(setting.name)}'", param=setting.name)
        fits = len(setting.dims) == len(spec.dims) and all(
            has in (-1, said) or said == -1 for said, has in zip(setting.dims, spec.dims, strict=True)
        )
        if setting.data_type != in_settings(spec.datatype) or not fits:
            said = f"{in_settings(spec.datatype)} {list(spec.dims)}"
            raise ConfigError(f"{where} '{spec.name}': the model has {said}", param=spec.name)
        dims = tuple(has if said == -1 else said for said, has in zip(setting.dims, spec.dims, strict=True))
        specs[spec.name] = spec._replace(dims=dims)
    return tuple(specs.values())


def _providers(group: InstanceGroup, place: Place) -> list[Any]:
    available = ort.get_available_providers()
    kind = group.kind
    if kind == "KIND_AUTO" and place.device != "auto":
        kind = "KIND_CPU" if place.device == "cpu" else "KIND_GPU"
    if kind == "KIND_CPU" or (kind == "KIND_AUTO" and _CUDA not in available):
        return [_CPU]
    if _CUDA not in available:
        raise ConfigError("an instance on a GPU needs onnxruntime-gpu and a GPU", param="instance_group")
    return [(_CUDA, {"device_id": group.gpus[0] if group.gpus else 0}), _CPU]


def _threads(settings: ModelSettings, place: Place) -> int:
    """Threads of one instance: they are shared out, unless the settings say something else."""
    for name in settings.parameters:
        if name not in _PARAMETERS:
            raise ConfigError(f"the parameter '{shown(name)}' is not known: {', '.join(_PARAMETERS)} are", param=name)
    said = settings.parameters.get("intra_op_thread_count")
    if isinstance(said, dict):  # as Triton has it: { string_value: "2" }
        said = said.get("string_value")
    if said is None:
        return max(1, (place.threads or len(os.sched_getaffinity(0))) // len(settings.instances))
    try:
        threads = int(said)
    except (TypeError, ValueError):
        threads = -1
    if threads < 0:
        raise ConfigError("intra_op_thread_count is to be a number of threads", param="intra_op_thread_count")
    return threads


def _unreadable(path: Path, error: Exception) -> ModelCorrupt | ModelUnsupported:
    kind = type(error).__name__
    cls = ModelUnsupported if kind in ("NotImplemented", "InvalidGraph") else ModelCorrupt
    return cls(f"{path}: ONNX Runtime cannot load it: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"'{name}': an element is not UTF-8", param=name) from None


def _bytes(texts: Array) -> Array:
    return np.array([str(one).encode() for one in texts.flat], NUMPY["BYTES"]).reshape(texts.shape)
