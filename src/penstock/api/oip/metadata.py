"""Metadata of the Open Inference Protocol: what this server is, and the tensors of a model that makes text."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from penstock.api.oip.request import DEFAULT_VERSION, FINISH_REASON, OWN, PARAMETERS, TEXT_INPUT, TEXT_OUTPUT
from penstock.api.oip.tensors import BYTES

SERVER = "penstock"
EXTENSIONS = ("binary_tensor_data", "parameters", "generate", "model_repository")
_OF_TENSORS = ("classification", "model_configuration", "statistics", "schedule_policy")


class TensorMetadata(NamedTuple):
    name: str
    datatype: str
    shape: list[int]  # -1: any number

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, "datatype": self.datatype, "shape": self.shape}


_OF_ANY_LENGTH = ("stop", "guided_choice")
INPUTS = [  # the first is needed, the others need not be sent
    TensorMetadata(TEXT_INPUT, BYTES, [-1]),
    *(TensorMetadata(name, kind, [-1 if name in _OF_ANY_LENGTH else 1]) for name, kind in (PARAMETERS | OWN).items()),
]
OUTPUTS = [TensorMetadata(TEXT_OUTPUT, BYTES, [-1]), TensorMetadata(FINISH_REASON, BYTES, [-1])]


def server_version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"


def server_metadata(*, has_tensors: bool = False) -> dict[str, object]:
    extensions = [*EXTENSIONS, *(_OF_TENSORS if has_tensors else ())]
    return {"name": SERVER, "version": server_version(), "extensions": extensions}


def model_metadata(model: str, model_version: str = "") -> dict[str, object]:
    return {
        "name": model,
        "versions": [model_version or DEFAULT_VERSION],
        "platform": SERVER,
        "inputs": [one.as_dict() for one in INPUTS],
        "outputs": [one.as_dict() for one in OUTPUTS],
    }
