"""tritonclient, as its users use it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.waiting import GIVE_UP_S

_TYPES = {"BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32}


def tensor(kind: Any, name: str, values: Sequence[Any], datatype: str = "BYTES", shape: Sequence[int] = ()) -> Any:
    """An input. `kind`: tritonclient.grpc or .http."""
    shape = list(shape) or [len(values)]
    if datatype == "BYTES":
        values = [value.encode() if isinstance(value, str) else value for value in values]
    found = kind.InferInput(name, shape, datatype)
    found.set_data_from_numpy(np.array(values, dtype=_TYPES.get(datatype, np.object_)).reshape(shape))
    return found


def inputs(kind: Any, text: str, count: int, *more: Any) -> list[Any]:
    return [tensor(kind, "text_input", [text]), tensor(kind, "max_tokens", [count], "INT32"), *more]


def texts(result: Any, name: str = "text_output") -> list[str]:
    return [value.decode() for value in result.as_numpy(name).reshape(-1)]


class Stream:
    """A stream of requests, and what came back."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.came: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        client.start_stream(callback=lambda result, error: self.came.put((result, error)))

    def ask(
        self, text: str, count: int, request_id: str = "", *, model: str = "small", streams: bool = True, **more: Any
    ) -> None:
        kind = tritonclient.grpc
        stream = tensor(kind, "stream", [streams], "BOOL")
        self.client.async_stream_infer(model, inputs(kind, text, count, stream), request_id=request_id, **more)

    def next(self) -> Any:
        result, error = self.came.get(timeout=GIVE_UP_S)
        if error is not None:
            raise error
        return result

    def until_final(self, num_requests: int = 1) -> dict[str, list[Any]]:
        """All pieces by their request's id, until each of so many requests has its last."""
        found: dict[str, list[Any]] = {}
        while num_requests:
            response = (result := self.next()).get_response()
            found.setdefault(response.id, []).append(result)
            num_requests -= response.parameters["triton_final_response"].bool_param
        return found


def joined(pieces: Sequence[Any]) -> str:
    return "".join(texts(piece)[0] for piece in pieces)
