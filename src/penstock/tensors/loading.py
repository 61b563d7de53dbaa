"""Loading of a model's directory to be served: every version is opened, its instances are made and warmed up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from penstock.core.config import shown
from penstock.core.errors import ConfigError, ModelError, PenstockError
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.tensors.batcher import BatchingRules
from penstock.tensors.datatypes import BYTES, NUMPY, Array, in_settings
from penstock.tensors.instances import QUICK_S, Instance
from penstock.tensors.model_settings import ModelSettings, Warmup, batching_rules
from penstock.tensors.onnx_model import OnnxModel, Place, Session
from penstock.tensors.repository import ModelDirectory
from penstock.tensors.served_model import Observer, ServedModel, ServedVersion
from penstock.tensors.signature import Signature
from penstock.tensors.text_model import VersionTexts
from penstock.tensors.text_reader import TextReader, read_texts

_MAX_WARMUP_ELEMENTS = 1 << 28
_MAX_QUICK_ELEMENTS = 1 << 16
_QUICK_TRIES_S = 0.05  # the best of these counts: other work of the machine has its share in each


class LoadedVersion(NamedTuple):
    """A version whose sessions have executed their warm-up."""

    version: int
    settings: ModelSettings
    signature: Signature
    rules: BatchingRules
    sessions: list[Session]
    labels: Mapping[str, Sequence[str]]  # names of classes, by output
    is_quick: bool = False  # its largest batch takes no longer than a moment
    texts: TextReader | str = ""  # or why it reads none; of the latest version


def load(directory: ModelDirectory, place: Place = Place()) -> list[LoadedVersion]:  # noqa: B008 (a tuple)
    """Takes as long as the files are large: for a thread. Raises ModelError, ConfigError."""
    loaded = []
    for version, path in directory.versions.items():
        model = OnnxModel(path, directory.settings, place)
        rules = batching_rules(directory.settings, model.signature.max_batch_size)
        sessions = model.sessions()
        for warmup in directory.settings.model_warmup:
            _warm_up(warmup, model.signature, sessions)
        is_latest = version == max(directory.versions)
        texts = read_texts((path.parent, directory.path), model.signature) if is_latest else ""
        labels, is_quick = _labels(directory), _is_quick(model.signature, sessions[0])
        loaded.append(
            LoadedVersion(version, directory.settings, model.signature, rules, sessions, labels, is_quick, texts)
        )
    return loaded


def serve(
    name: str,
    loaded: Sequence[LoadedVersion],
    clock: TimerClock = LOOP_CLOCK,
    observer: Observer | None = None,
) -> ServedModel:
    """Model that is served, in the event loop that requests come from."""
    versions: dict[int, ServedVersion] = {}
    texts: VersionTexts | str = ""
    for one in loaded:
        is_batched = one.signature.max_batch_size > 0
        instances = [
            Instance(f"{name}-{one.version}-{number}", session, is_batched=is_batched, is_quick=one.is_quick)
            for number, session in enumerate(one.sessions)
        ]
        versions[one.version] = ServedVersion(
            name,
            one.version,
            one.settings,
            one.signature,
            one.rules,
            instances,
            labels=one.labels,
            clock=clock,
            observer=observer,
        )
        if one.texts:
            texts = VersionTexts(versions[one.version], one.texts) if isinstance(one.texts, TextReader) else one.texts
    return ServedModel(name, versions, texts)


def _is_quick(signature: Signature, session: Session) -> bool:
    """Whether a model whose inputs have one size computes its largest batch in a moment, which is tried with zeros:
    one row, and only where that is quick all of them."""
    if session.device != "cpu" or any(-1 in spec.dims or spec.datatype == BYTES for spec in signature.inputs):
        return False
    outputs = [spec.name for spec in signature.outputs]
    for rows in dict.fromkeys((1, max(1, signature.max_batch_size))):
        shapes = {spec.name: (rows, *spec.dims) if signature.max_batch_size else spec.dims for spec in signature.inputs}
        if sum(math.prod(shape) for shape in shapes.values()) > _MAX_QUICK_ELEMENTS:
            return False
        inputs = {spec.name: np.zeros(shapes[spec.name], NUMPY[spec.datatype]) for spec in signature.inputs}
        best_s, until_s = math.inf, perf_counter() + _QUICK_TRIES_S
        while best_s > QUICK_S / 2:
            began_s = perf_counter()
            if began_s > until_s:
                return False
            try:
                session.run(inputs, outputs)
            except Exception:  # zeros may mean nothing to it
                return False
            best_s = min(best_s, perf_counter() - began_s)
    return True


def _labels(directory: ModelDirectory) -> dict[str, list[str]]:
    found = {}
    for output in directory.settings.output:
        if output.label_filename:
            path = directory.path / output.label_filename
            try:
                found[output.name] = path.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}", param="label_filename") from None
    return found


def _warm_up(warmup: Warmup, signature: Signature, sessions: Sequence[Session]) -> None:
    where = f"model_warmup '{warmup.name}'" if warmup.name else "model_warmup"
    inputs: dict[str, Array] = {}
    known = {spec.name: spec for spec in signature.inputs}
    for name, given in warmup.inputs.items():
        spec = known.get(name)
        if spec is None or given.data_type != in_settings(spec.datatype):
            said = "has no such input" if spec is None else f"takes {in_settings(spec.datatype)}"
            raise ConfigError(f"{where}: '{shown(name)}': the model {said}", param="model_warmup")
        dims = [warmup.batch_size, *given.dims] if signature.max_batch_size else given.dims
        if np.prod(dims, dtype=float) > _MAX_WARMUP_ELEMENTS:
            raise ConfigError(f"{where}: '{shown(name)}' is too large", param="model_warmup")
        inputs[name] = _values(spec.datatype, tuple(dims), is_random=given.random_data)
    try:
        signature.check(inputs)
        for session, _ in itertools.product(sessions, range(max(1, warmup.count))):
            session.run(inputs, [spec.name for spec in signature.outputs])
    except ModelError:
        raise
    except PenstockError as error:
        raise ConfigError(f"{where}: {error.message}", param="model_warmup") from None


def _values(datatype: str, shape: tuple[int, ...], *, is_random: bool) -> Array:
    if datatype == BYTES:
        return np.full(shape, b"", dtype=object)
    dtype = NUMPY[datatype]
    if not is_random or dtype.kind != "f":
        return np.zeros(shape, dtype)
    return np.random.default_rng(0).random(shape).astype(dtype)
