"""The actor that looks at one node for `penstock doctor`. It changes nothing, and ends with its questions.

It travels to its node as code, so that a node without penstock can be asked too: this module imports the standard
library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path

_REACH_S = 3.0


class NodeProbe:
    def report(self, paths: Sequence[str], store: Sequence[tuple[str, int]]) -> dict[str, object]:
        """The fields of a `NodeReport`. `paths`: files of models; `store`: hosts and ports that take connections."""
        penstock, problem = "", ""
        try:
            # The module that starts an engine, and not the bare package: what it imports must be there, too.
            importlib.import_module("penstock.fleet.drivers.ray_actor")
            penstock = str(importlib.import_module("penstock").__version__)
        except Exception as error:  # whatever a foreign or half-installed package raises
            problem = f"{type(error).__name__}: {error}"
        return {
            "python": platform.python_version(),
            "ray": str(importlib.import_module("ray").__version__),
            "penstock": penstock,
            "problem": problem,
            "has_torch": importlib.util.find_spec("torch") is not None,
            "missing": [path for path in paths if not Path(path).expanduser().exists()],
            "store_failure": _unreachable(store),
        }

    def clock(self) -> float:
        return time.time()


def _unreachable(places: Sequence[tuple[str, int]]) -> str:
    """Returns why none of several places takes a connection; empty: one does, or there are none."""
    why = ""
    for host, port in places:
        try:
            socket.create_connection((host, port), _REACH_S).close()
        except OSError as error:
            why = f"{host}:{port}: {error}"
        else:
            return ""
    return why
