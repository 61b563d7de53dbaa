"""The process of a Python step: `python -m penstock.gateway.pipelines.python_process DESCRIPTOR FILE FUNCTION MEMORY`.

It loads the operator's file, says so, and calls the function for each frame that comes on the socket, until that is
closed. Its memory is limited before the file is loaded; its time is the starter's to measure, which kills it. It ends
with its starter, whatever it is doing. Nothing but the standard library is imported, so that it starts fast.

A frame is a length of four bytes and JSON: {"arguments": …} in; {"ready": true}, {"value": …} or {"error": …,
"reason": …} out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.link.parent_death import end_with_parent

MAX_FRAME_BYTES = 8 << 20
_MAX_ERROR = 500  # characters that are told of an exception
_MAX_FILES = 256


def main() -> None:
    write_stacks_on_crash()
    descriptor, file, function, memory_mib = sys.argv[1:]
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group; the gateway decides when this ends
    os.dup2(2, 1)  # what the function prints goes to the gateway's log
    with socket.socket(fileno=int(descriptor)) as link:
        try:
            limit(int(memory_mib) << 20)
            called = load(Path(file), function)
        except BaseException as error:  # whatever the operator's file does when it is loaded
            _send(link, {"error": _told(error), "reason": "start"})
            return
        _send(link, {"ready": True})
        while (frame := _receive(link)) is not None:
            _send(link, _answer(called, frame["arguments"]))


def load(path: Path, function: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    sys.path.append(str(path.parent))  # last: a file beside it takes no name of the standard library
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, function)
    if not callable(found):
        raise TypeError(f"{function} is no function")
    return found  # type: ignore[no-any-return]


def limit(memory_bytes: int) -> None:
    """On top of what the interpreter has."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: _MAX_FILES}
    with contextlib.suppress(OSError):  # only Linux says how much there is already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory_bytes
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _answer(called: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = called(**arguments)
    except MemoryError:
        return {"error": "it ran out of the memory that it may use", "reason": "memory"}
    except Exception as error:
        traceback.print_exc()  # for the gateway's log: its words may not be meant for a client
        return {"error": f"its function raised {type(error).__name__}", "reason": "raised"}
    return {"value": value}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR]


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    try:
        data = json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        data = json.dumps({"error": f"its result is no JSON: {error}"[:_MAX_ERROR], "reason": "wrong_result"}).encode()
    except MemoryError:
        data = b'{"error":"it ran out of the memory that it may use","reason":"memory"}'
    if len(data) > MAX_FRAME_BYTES:
        data = b'{"error":"its result is too large","reason":"too_large"}'
    link.sendall(len(data).to_bytes(4, "big") + data)


def _receive(link: socket.socket) -> dict[str, Any] | None:
    """None: nobody is there any more."""
    head = _read(link, 4)
    body = _read(link, int.from_bytes(head, "big")) if head is not None else None
    return json.loads(body) if body is not None else None


def _read(link: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = link.recv(min(1 << 20, count - len(data)))
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
