"""Places of a model's files: a file `x.onnx`, a directory with `model.onnx`, or Triton's layout.

    classifier/config.yaml        settings; config.pbtxt does, too; without either there are defaults
    classifier/1/model.onnx       versions are numbers
    classifier/2/model.onnx
    classifier/tokenizer.json     for the endpoints that take texts

A directory of such directories is a repository of several models. Files of the Hugging Face Hub may have `onnx/` before
model.onnx.

Nothing here opens a model, so a command can ask what a path is.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import ConfigError, ModelMissing
from penstock.tensors.model_settings import CONFIG_FILES, ModelSettings, VersionPolicy, read_settings

_MODEL_FILE = "model.onnx"
_HUB_FILE = "onnx/model.onnx"
_OTHER_WEIGHTS = (".safetensors", ".gguf", ".bin")  # beside which an exported file is not what is meant
_SUFFIX = ".onnx"


class ModelDirectory(NamedTuple):
    name: str
    settings: ModelSettings
    versions: dict[int, Path]  # those that are served, the lowest first
    path: Path  # of files beside them


def is_tensor_model(model: str) -> bool:
    """Whether this names an ONNX model, and not one that makes text."""
    path = Path(model)
    if path.suffix == _SUFFIX:
        return True
    if not path.is_dir():
        return False
    if (path / _MODEL_FILE).is_file() or _versions(path, _MODEL_FILE) or (path / "config.pbtxt").is_file():
        return True
    has_others = any(one.suffix in _OTHER_WEIGHTS for one in path.iterdir())
    return (path / _HUB_FILE).is_file() and not has_others


def is_repository(model: str) -> bool:
    """Whether this is a directory of several such models."""
    path = Path(model)
    return path.is_dir() and not is_tensor_model(model) and bool(models_in(path))


def models_in(path: Path) -> dict[str, Path]:
    """The models of a repository, by name."""
    found = sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    return {one.name: one for one in found if is_tensor_model(str(one))}


def open_directory(model: str, settings: ModelSettings | None = None) -> ModelDirectory:
    """`settings`: instead of its file's. Raises ModelMissing, ConfigError."""
    path = Path(model)
    if path.is_dir():
        return _open(path, settings)
    if not path.is_file():
        raise ModelMissing(f"there is no file {path}")
    return ModelDirectory(path.stem, settings or ModelSettings(), {1: path}, path.parent)


def _open(path: Path, given: ModelSettings | None) -> ModelDirectory:
    files = [path / name for name in CONFIG_FILES if (path / name).is_file()]
    if len(files) > 1:
        raise ConfigError(f"{path} has {files[0].name} and {files[1].name}: only one of them is read")
    settings = given or (read_settings(files[0]) if files else ModelSettings())
    name = path.resolve().name
    if settings.name not in ("", name):
        raise ConfigError(f"{path}: the name is '{settings.name}', and the directory's is '{name}'", param="name")
    file_name = settings.default_model_filename
    found = _versions(path, file_name)
    if not found and (path / file_name).is_file():
        found = {1: path / file_name}
    if not found and (path / _HUB_FILE).is_file():
        found = {1: path / _HUB_FILE}
    if not found:
        raise ModelMissing(f"{path} has no version: a file such as 1/{file_name}")
    return ModelDirectory(name, settings, _served(found, settings.version_policy, path), path)


def _versions(path: Path, file_name: str) -> dict[int, Path]:
    """Directories whose names are numbers, as Triton has it: others, and those with a leading zero, are no versions."""
    numbers = sorted(
        int(one.name) for one in path.iterdir() if one.name.isdecimal() and one.name.isascii() and one.name[0] != "0"
    )
    files = {number: path / str(number) / file_name for number in numbers}
    return {number: file for number, file in files.items() if file.is_file()}


def _served(found: dict[int, Path], policy: VersionPolicy, path: Path) -> dict[int, Path]:
    if policy.all is not None:
        return found
    if policy.specific is not None:
        for number in policy.specific.versions:
            if number not in found:
                raise ModelMissing(f"{path} has no version {number}, which version_policy names")
        return {number: found[number] for number in sorted(policy.specific.versions)}
    count = policy.latest.num_versions if policy.latest is not None else 1
    return {number: found[number] for number in list(found)[-count:]}
