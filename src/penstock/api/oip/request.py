"""Requests of the Open Inference Protocol, as the request of /v1/completions that asks for the same.

A parameter is an input tensor or a parameter of the request, whichever a client finds easier. Names are checked here,
values where they are used: by the replica, as over /v1/completions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.api.decoding import check_size
from penstock.api.oip.tensors import BYTES, Tensor
from penstock.core.config import nearest, shown
from penstock.core.errors import InvalidRequest, UnsupportedParameter

TEXT_INPUT, TEXT_OUTPUT, FINISH_REASON = "text_input", "text_output", "finish_reason"
OUTPUTS = (TEXT_OUTPUT, FINISH_REASON)
DEFAULT_VERSION = "1"  # the version that a client means who means none
MAX_ID = 1024  # characters

# Fields of /v1/completions with the datatypes that metadata names. Any whole number is taken for one, and any number
# for a float.
PARAMETERS = {
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_p": "FP32",
    "top_k": "INT32",
    "min_p": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "repetition_penalty": "FP32",
    "seed": "INT64",
    "stop": BYTES,  # as many as one likes
    "ignore_eos": "BOOL",
    "skip_special_tokens": "BOOL",
    "include_stop_str_in_output": "BOOL",
    "truncate_prompt_tokens": "INT32",
    "user": BYTES,
    "guided_json": BYTES,
    "guided_regex": BYTES,
    "guided_choice": BYTES,
    "guided_grammar": BYTES,
}
ALIASES = {"stop_words": "stop", "random_seed": "seed", "min_length": "min_tokens"}  # of Triton's other LLM backends
STREAM, WITHOUT_INPUT, SAMPLING = "stream", "exclude_input_in_output", "sampling_parameters"
OWN = {STREAM: "BOOL", WITHOUT_INPUT: "BOOL", SAMPLING: BYTES}
_LISTS = ("stop", "guided_choice")
_JSON = ("guided_json",)
_MARKS = ("triton_enable_empty_final_response", "binary_data_output")  # about the answer's form alone
_KNOWN = (*PARAMETERS, *ALIASES, *OWN)


class InferenceRequest(NamedTuple):
    model: str
    version: str
    id: str
    texts: list[str]
    shape: tuple[int, ...]  # of the texts, and so of the outputs
    fields: dict[str, Any]  # of the completion
    stream: bool | None  # None: the client does not say
    outputs: tuple[str, ...]

    def completion(self, *, streams: bool) -> bytes:
        """The body of the request of /v1/completions."""
        prompt = self.texts[0] if len(self.texts) == 1 else self.texts
        body = {"model": model_name(self.model, self.version), "prompt": prompt, **self.fields}
        return msgspec.json.encode(body | {"stream": True} if streams else body)


def model_name(model: str, version: str) -> str:
    """The name that gateways give a version of a model."""
    return model if version in ("", DEFAULT_VERSION) else f"{model}@{version}"


def from_tensors(
    model: str,
    version: str,
    request_id: str,
    tensors: Iterable[Tensor],
    parameters: Mapping[str, Any],
    outputs: Collection[str],
) -> InferenceRequest:
    """The request of `infer`. `outputs`: those that are asked for; none: all. Raises InvalidRequest."""
    texts: Tensor | None = None
    given: dict[str, Any] = {}
    for tensor in tensors:
        if tensor.name == TEXT_INPUT:
            if texts is not None:
                raise InvalidRequest(f"{TEXT_INPUT} is given twice", param=TEXT_INPUT)
            texts = tensor
        else:
            _add(given, tensor.name, _value(tensor))
    if texts is None:
        raise InvalidRequest(f"{TEXT_INPUT} is missing: a BYTES tensor of shape [1]", param=TEXT_INPUT)
    _check_texts(texts)
    for name, value in parameters.items():
        _add(given, name, value)
    for name in outputs:
        if name not in OUTPUTS:
            raise InvalidRequest(f"'{shown(name)}' is no output: {' and '.join(OUTPUTS)} are", param=shown(name))
    prompts = [str(value) for value in texts.values]
    return _request(model, version, request_id, prompts, texts.shape, given, tuple(dict.fromkeys(outputs)) or OUTPUTS)


def from_generate(model: str, version: str, body: bytes) -> InferenceRequest:
    """The request of `generate`: parameters stand beside `text_input`, or in `parameters`. Raises InvalidRequest."""
    check_size(body)
    try:
        members = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError:
        raise InvalidRequest("the body is to be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    text, request_id = members.pop(TEXT_INPUT, None), members.pop("id", None)
    parameters = members.pop("parameters", None)
    if not isinstance(text, str):
        raise InvalidRequest(f"{TEXT_INPUT} is to be a text", param=TEXT_INPUT)
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidRequest("id is to be a text", param="id")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest("parameters is to be an object", param="parameters")
    given: dict[str, Any] = {}
    for name, value in (*members.items(), *(parameters or {}).items()):
        _add(given, name, value)
    return _request(model, version, request_id or "", [text], (1,), given, (TEXT_OUTPUT,))


def _request(
    model: str,
    version: str,
    request_id: str,
    texts: list[str],
    shape: tuple[int, ...],
    given: dict[str, Any],
    outputs: tuple[str, ...],
) -> InferenceRequest:
    if len(request_id) > MAX_ID:
        raise InvalidRequest(f"id has more than {MAX_ID} characters", param="id")
    stream, without_input = given.pop(STREAM, None), given.pop(WITHOUT_INPUT, None)
    for name, value in ((STREAM, stream), (WITHOUT_INPUT, without_input)):
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"{name} is to be true or false", param=name)
    for name, value in _sampling(given.pop(SAMPLING, None)).items():
        if name in OWN:
            raise InvalidRequest(f"{name} stands beside {SAMPLING}, not in it", param=name)
        _add(given, name, value)
    fields = {name: _field(name, value) for name, value in given.items() if value is not None}
    if without_input is False:
        fields["echo"] = True
    if stream and len(texts) > 1:
        raise UnsupportedParameter(f"{STREAM}: {TEXT_INPUT} has {len(texts)} texts; a stream is of one", param=STREAM)
    return InferenceRequest(model, version, request_id, texts, shape, fields, stream, outputs)


def _add(given: dict[str, Any], name: str, value: object) -> None:
    if name in _MARKS:
        return
    if name not in _KNOWN:
        hint = nearest(name, _KNOWN)
        suggestion = f"; did you mean '{hint}'?" if hint else ""
        raise UnsupportedParameter(f"'{shown(name)}' is no input or parameter{suggestion}", param=shown(name))
    plain = ALIASES.get(name, name)
    if plain in given:
        raise InvalidRequest(f"{plain} is given twice", param=name)
    given[plain] = value


def _check_texts(texts: Tensor) -> None:
    if texts.datatype != BYTES:
        raise InvalidRequest(f"{TEXT_INPUT} is {texts.datatype}; it is to be BYTES", param=TEXT_INPUT)
    if not texts.values or len(texts.shape) not in (1, 2) or (len(texts.shape) == 2 and texts.shape[1] != 1):
        said = f"{TEXT_INPUT} has the shape {list(texts.shape)}; it is to be [n] or [n, 1], with a text in it"
        raise InvalidRequest(said, param=TEXT_INPUT)


def _value(tensor: Tensor) -> object:
    """The value of a parameter's tensor: one value for all texts, or a list where the parameter is one."""
    if ALIASES.get(tensor.name, tensor.name) in _LISTS:
        return list(tensor.values)
    if tensor.name in _KNOWN and len(tensor.values) != 1:
        said = f"{tensor.name} has {len(tensor.values)} elements; it is one value, for all of {TEXT_INPUT}"
        raise InvalidRequest(said, param=tensor.name)
    return tensor.values[0] if tensor.values else None


def _field(name: str, value: object) -> object:
    """Texts of JSON, as clients send them who have tensors only, and floats that are whole numbers."""
    if name in _JSON and isinstance(value, str):
        return _decoded(name, value)
    if PARAMETERS[name].startswith("INT") and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _sampling(value: object) -> dict[str, Any]:
    """vLLM's backend takes all parameters in one text of JSON."""
    if value is None:
        return {}
    found = _decoded(SAMPLING, value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise InvalidRequest(f"{SAMPLING} is to be a JSON object", param=SAMPLING)
    return found


def _decoded(name: str, text: str) -> Any:
    encoded = text.encode(errors="surrogatepass")
    check_size(encoded)
    try:
        return msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest(f"{name} is not valid JSON", param=name) from None
