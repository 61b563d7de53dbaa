"""A penstock home for each process of pytest, and for the servers that it starts: their stores, usage and logs are not
the user's, and are gone after the run. What was fetched or compiled is the user's own, and is found again."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from penstock.core.private_files import make_private
from penstock.hub.home import penstock_home

_CACHES = ("models", "kernels", "packed", "formats", "triton", "rehearsals", "kubernetes-1.20")
_LOCKS = ("kernels.lock",)


def use_a_home_of_its_own() -> None:
    own = Path(tempfile.mkdtemp(prefix="home"))
    link_caches(own)
    os.environ["PENSTOCK_HOME"] = str(own)
    atexit.register(shutil.rmtree, own, ignore_errors=True)  # links alone go with it


def link_caches(own: Path) -> None:
    """Files that take minutes to fetch or to make are found in this home as in the one that is in force."""
    users = penstock_home().absolute()
    for name in _CACHES:
        make_private(users / name)
        (own / name).symlink_to((users / name).resolve())
    for name in _LOCKS:
        (own / name).symlink_to((users / name).resolve())
