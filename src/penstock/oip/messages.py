"""Messages of `inference.GRPCInferenceService`, as far as models here need them. A test holds the table to
those that tritonclient was made with."""

from __future__ import annotations

from penstock.oip import description_messages as descriptions
from penstock.rpc.messages import ProtoFile

_PARAMETERS = "map:InferParameter"
_TENSOR = {
    "name": (1, "string"),
    "datatype": (2, "string"),
    "shape": (3, "*int64"),
    "parameters": (4, _PARAMETERS),
    "contents": (5, "InferTensorContents"),
}
_INPUT, _WANTED = "ModelInferRequest.InferInputTensor", "ModelInferRequest.InferRequestedOutputTensor"
_OUTPUT, _METADATA = "ModelInferResponse.InferOutputTensor", "ModelMetadataResponse.TensorMetadata"
MESSAGES = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "*string")},
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "*string"),
        "platform": (3, "string"),
        "inputs": (4, f"*{_METADATA}"),
        "outputs": (5, f"*{_METADATA}"),
    },
    _METADATA: {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "*int64")},
    "InferParameter": {
        "bool_param": (1, "|bool"),
        "int64_param": (2, "|int64"),
        "string_param": (3, "|string"),
        "double_param": (4, "|double"),
        "uint64_param": (5, "|uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "*bool"),
        "int_contents": (2, "*int32"),
        "int64_contents": (3, "*int64"),
        "uint_contents": (4, "*uint32"),
        "uint64_contents": (5, "*uint64"),
        "fp32_contents": (6, "*float"),
        "fp64_contents": (7, "*double"),
        "bytes_contents": (8, "*bytes"),
    },
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "inputs": (5, f"*{_INPUT}"),
        "outputs": (6, f"*{_WANTED}"),
        "raw_input_contents": (7, "*bytes"),
    },
    _INPUT: _TENSOR,
    _WANTED: {"name": (1, "string"), "parameters": (2, _PARAMETERS)},
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "outputs": (5, f"*{_OUTPUT}"),
        "raw_output_contents": (6, "*bytes"),
    },
    _OUTPUT: _TENSOR,
    "ModelStreamInferResponse": {"error_message": (1, "string"), "infer_response": (2, "ModelInferResponse")},
}
METHODS = {
    "ServerLive": ("ServerLiveRequest", "ServerLiveResponse"),
    "ServerReady": ("ServerReadyRequest", "ServerReadyResponse"),
    "ModelReady": ("ModelReadyRequest", "ModelReadyResponse"),
    "ServerMetadata": ("ServerMetadataRequest", "ServerMetadataResponse"),
    "ModelMetadata": ("ModelMetadataRequest", "ModelMetadataResponse"),
    "ModelInfer": ("ModelInferRequest", "ModelInferResponse"),
    "ModelStreamInfer": ("*ModelInferRequest", "*ModelStreamInferResponse"),
    **descriptions.METHODS,
}
FILE = ProtoFile(
    "grpc_service.proto",
    "inference",
    MESSAGES | descriptions.STATISTICS | descriptions.CONFIG | descriptions.REPOSITORY,
    oneofs={"InferParameter": "parameter_choice"} | descriptions.ONEOFS,
    services={"GRPCInferenceService": METHODS},
)
(SERVICE,) = FILE.services
