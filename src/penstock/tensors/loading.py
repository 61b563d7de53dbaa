"""From a model's directory to a model that is served: every version is opened, its instances are made and warmed up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.config import shown
from penstock.core.errors import ConfigError, ModelError, PenstockError
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.tensors.batcher import BatchingRules
from penstock.tensors.datatypes import BYTES, NUMPY, Array, in_settings
from penstock.tensors.instances import Instance
from penstock.tensors.model_settings import ModelSettings, Warmup, batching_rules
from penstock.tensors.onnx_model import OnnxModel, Session
from penstock.tensors.repository import ModelDirectory
from penstock.tensors.served_model import Observer, ServedModel, ServedVersion
from penstock.tensors.signature import Signature
from penstock.tensors.text_model import VersionTexts
from penstock.tensors.text_reader import TextReader, read_texts

_MAX_WARMUP_ELEMENTS = 1 << 28


class LoadedVersion(NamedTuple):
    """A version whose sessions have executed their warm-up."""

    version: int
    settings: ModelSettings
    signature: Signature
    rules: BatchingRules
    sessions: list[Session]
    labels: Mapping[str, Sequence[str]]  # of classes, by output
    texts: TextReader | str = ""  # or why it reads none; of the latest version


def load(directory: ModelDirectory) -> list[LoadedVersion]:
    """Takes as long as the files are large: for a thread. Raises ModelError, ConfigError."""
    loaded = []
    for version, path in directory.versions.items():
        model = OnnxModel(path, directory.settings)
        rules = batching_rules(directory.settings, model.signature.max_batch_size)
        sessions = model.sessions()
        for warmup in directory.settings.model_warmup:
            _warm_up(warmup, model.signature, sessions)
        is_latest = version == max(directory.versions)
        texts = read_texts((path.parent, directory.path), model.signature) if is_latest else ""
        labels = _labels(directory)
        loaded.append(LoadedVersion(version, directory.settings, model.signature, rules, sessions, labels, texts))
    return loaded


def serve(
    name: str,
    loaded: Sequence[LoadedVersion],
    clock: TimerClock = LOOP_CLOCK,
    observer: Observer | None = None,
) -> ServedModel:
    """In the event loop that requests come from."""
    versions: dict[int, ServedVersion] = {}
    texts: VersionTexts | str = ""
    for one in loaded:
        is_batched = one.signature.max_batch_size > 0
        instances = [
            Instance(f"{name}-{one.version}-{number}", session, is_batched=is_batched)
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
