"""Messages that describe models which take tensors: statistics whole, and of a configuration what a model here may
have. Enums are numbers here, as they are on the wire. A test holds the tables to those that tritonclient was made with.
"""

from __future__ import annotations

from typing import Any

_DURATION, _STEPS = "StatisticDuration", ("compute_input", "compute_infer", "compute_output")
_OF_INFERENCE = ("success", "fail", "queue", *_STEPS, "cache_hit", "cache_miss")
_OF_RESPONSES = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
STATISTICS = {
    "ModelStatisticsRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelStatisticsResponse": {"model_stats": (1, "*ModelStatistics")},
    _DURATION: {"count": (1, "uint64"), "ns": (2, "uint64")},
    "InferStatistics": {name: (number, _DURATION) for number, name in enumerate(_OF_INFERENCE, 1)},
    "InferBatchStatistics": {
        "batch_size": (1, "uint64"),
        **{name: (number, _DURATION) for number, name in enumerate(_STEPS, 2)},
    },
    "InferResponseStatistics": {name: (number, _DURATION) for number, name in enumerate(_OF_RESPONSES, 1)},
    "MemoryUsage": {"type": (1, "string"), "id": (2, "int64"), "byte_size": (3, "uint64")},
    "ModelStatistics": {
        "name": (1, "string"),
        "version": (2, "string"),
        "last_inference": (3, "uint64"),
        "inference_count": (4, "uint64"),
        "execution_count": (5, "uint64"),
        "inference_stats": (6, "InferStatistics"),
        "batch_stats": (7, "*InferBatchStatistics"),
        "memory_usage": (8, "*MemoryUsage"),
        "response_stats": (9, "map:InferResponseStatistics"),
    },
}
CONFIG = {
    "ModelConfigRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "backend": (17, "string"),
        "version_policy": (3, "ModelVersionPolicy"),
        "max_batch_size": (4, "int32"),
        "input": (5, "*ModelInput"),
        "output": (6, "*ModelOutput"),
        "instance_group": (7, "*ModelInstanceGroup"),
        "default_model_filename": (8, "string"),
        "dynamic_batching": (11, "ModelDynamicBatching"),
    },
    "ModelVersionPolicy": {
        "latest": (1, "|ModelVersionPolicy.Latest"),
        "all": (2, "|ModelVersionPolicy.All"),
        "specific": (3, "|ModelVersionPolicy.Specific"),
    },
    "ModelVersionPolicy.Latest": {"num_versions": (1, "uint32")},
    "ModelVersionPolicy.All": {},
    "ModelVersionPolicy.Specific": {"versions": (1, "*int64")},
    "ModelInput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (4, "*int64")},
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (3, "*int64")},
    "ModelInstanceGroup": {"name": (1, "string"), "count": (2, "int32"), "kind": (4, "int32"), "gpus": (3, "*int32")},
    "ModelDynamicBatching": {
        "preferred_batch_size": (1, "*int32"),
        "max_queue_delay_microseconds": (2, "uint64"),
        "preserve_ordering": (3, "bool"),
        "priority_levels": (4, "uint64"),
        "default_priority_level": (5, "uint64"),
        "default_queue_policy": (6, "ModelQueuePolicy"),
    },
    "ModelQueuePolicy": {
        "timeout_action": (1, "int32"),
        "default_timeout_microseconds": (2, "uint64"),
        "allow_timeout_override": (3, "bool"),
        "max_queue_size": (4, "uint32"),
    },
}
_PARAMETERS = "map:ModelRepositoryParameter"
REPOSITORY = {
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "RepositoryIndexResponse": {"models": (1, "*RepositoryIndexResponse.ModelIndex")},
    "RepositoryIndexResponse.ModelIndex": {
        "name": (1, "string"),
        "version": (2, "string"),
        "state": (3, "string"),
        "reason": (4, "string"),
    },
    "ModelRepositoryParameter": {
        "bool_param": (1, "|bool"),
        "int64_param": (2, "|int64"),
        "string_param": (3, "|string"),
        "bytes_param": (4, "|bytes"),
    },
    "RepositoryModelLoadRequest": {
        "repository_name": (1, "string"),
        "model_name": (2, "string"),
        "parameters": (3, _PARAMETERS),
    },
    "RepositoryModelLoadResponse": {},
    "RepositoryModelUnloadRequest": {
        "repository_name": (1, "string"),
        "model_name": (2, "string"),
        "parameters": (3, _PARAMETERS),
    },
    "RepositoryModelUnloadResponse": {},
}
METHODS = {
    "ModelConfig": ("ModelConfigRequest", "ModelConfigResponse"),
    "ModelStatistics": ("ModelStatisticsRequest", "ModelStatisticsResponse"),
    "RepositoryIndex": ("RepositoryIndexRequest", "RepositoryIndexResponse"),
    "RepositoryModelLoad": ("RepositoryModelLoadRequest", "RepositoryModelLoadResponse"),
    "RepositoryModelUnload": ("RepositoryModelUnloadRequest", "RepositoryModelUnloadResponse"),
}
ONEOFS = {"ModelVersionPolicy": "policy_choice", "ModelRepositoryParameter": "parameter_choice"}

_TYPES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "STRING",
)  # fmt: skip
_NUMBERS = {
    "data_type": {f"TYPE_{name}": number for number, name in enumerate(_TYPES)},
    "kind": {"KIND_AUTO": 0, "KIND_GPU": 1, "KIND_CPU": 2},
    "timeout_action": {"REJECT": 0, "DELAY": 1},
}


def config_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The members of a ModelConfigResponse, of a configuration as JSON has it. Members without a place in the message
    are left out."""
    return {"config": _fields("ModelConfig", config)}


def _fields(message: str, values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, (_, kind) in CONFIG[message].items():
        value = values.get(name)
        if value is None:
            continue
        inner = kind.lstrip("*|")
        if name in _NUMBERS:
            value = _NUMBERS[name][value]
        elif inner in CONFIG:
            value = [_fields(inner, one) for one in value] if kind[0] == "*" else _fields(inner, value)
        found[name] = value
    return found
