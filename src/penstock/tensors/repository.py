"""Where a model's files lie: a file `x.onnx`, a directory with `model.onnx`, or Triton's layout.

    classifier/config.yaml        settings; config.pbtxt does, too; without either there are defaults
    classifier/1/model.onnx       versions are numbers
    classifier/2/model.onnx
    classifier/tokenizer.json     for the endpoints that take texts

Nothing here opens a model, so a command can ask what a path is.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import ConfigError, ModelMissing
from penstock.tensors.model_settings import CONFIG_FILES, ModelSettings, VersionPolicy, read_settings

_MODEL_FILE = "model.onnx"
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
    return (path / _MODEL_FILE).is_file() or bool(_versions(path, _MODEL_FILE)) or (path / "config.pbtxt").is_file()


def open_directory(model: str) -> ModelDirectory:
    """Raises ModelMissing, ConfigError."""
    path = Path(model)
    if path.is_dir():
        return _open(path)
    if not path.is_file():
        raise ModelMissing(f"there is no file {path}")
    return ModelDirectory(path.stem, ModelSettings(), {1: path}, path.parent)


def _open(path: Path) -> ModelDirectory:
    files = [path / name for name in CONFIG_FILES if (path / name).is_file()]
    if len(files) > 1:
        raise ConfigError(f"{path} has {files[0].name} and {files[1].name}: only one of them is read")
    settings = read_settings(files[0]) if files else ModelSettings()
    name = path.resolve().name
    if settings.name not in ("", name):
        raise ConfigError(f"{files[0]}: the name is '{settings.name}', and the directory's is '{name}'", param="name")
    file_name = settings.default_model_filename
    found = _versions(path, file_name)
    if not found and (path / file_name).is_file():
        found = {1: path / file_name}
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
