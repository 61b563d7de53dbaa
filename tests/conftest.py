import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collecting import check, is_left_out, mark_models
from tests.examples import use_no_constants, use_profiles
from tests.gpu import has_gpu
from tests.home import use_a_home_of_its_own
from tests.reporting import Reporter

# Tiny shapes gain nothing from a second torch thread, and on a busy machine every operation would wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For the whole process, by torch's and gRPC's own code or by ours that imports them.
_SET_BY_LIBRARIES = {
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NIXL_LOG_LEVEL"),
    *("GRPC_ENABLE_FORK_SUPPORT", "GLOO_SOCKET_IFNAME"),
}

use_profiles()
use_a_home_of_its_own()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter())
    if config.getoption("--hypothesis-profile") is None:
        use_no_constants()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return is_left_out(collection_path, config.option.markexpr) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_models(items)
    check(items)  # before those that are not wanted are gone


# Triton reads this when kernels are defined. See tests/devices.py.
if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module", autouse=True)
def environment_is_left_as_it_was() -> Iterator[None]:
    """Fails a file that leaves variables changed: servers and commands of later files in the worker would have them."""
    before = dict(os.environ)
    yield
    names = {name for name, _ in before.items() ^ os.environ.items()} - {"PYTEST_CURRENT_TEST"}
    changed = sorted(names - _SET_BY_LIBRARIES)
    for name in changed:  # so that one file alone is found guilty
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"this file leaves environment variables changed: {', '.join(changed)}"


gc.unfreeze = gc.freeze  # the bench and the simulator thaw what is there; see below


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Imports make a million objects, and all of them stay: to look through them takes 0.3 s a time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
