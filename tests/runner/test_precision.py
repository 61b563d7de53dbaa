from __future__ import annotations

from typing import Literal

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.runner.precision import fp8_obstacle, int8_kv_obstacle, name, resolve_kv_dtype, resolve_quant

OLD_GPU = "this GPU, of compute capability 8.0, has no FP8 arithmetic"


@pytest.mark.parametrize(
    ("wanted", "stored", "expected"),
    [
        ("auto", None, "none"),
        ("auto", "fp8", "fp8"),
        ("none", "fp8", "none"),
        ("none", None, "none"),
        ("fp8", None, "fp8"),
        ("fp8", "fp8", "fp8"),
    ],
)
def test_weights_are_as_asked_and_otherwise_as_stored(
    wanted: Literal["auto", "none", "fp8"], stored: Literal["fp8"] | None, expected: str
) -> None:
    assert resolve_quant(wanted, stored, None) == expected


def test_stored_fp8_is_widened_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_quant("auto", "fp8", OLD_GPU) == "none"
    assert OLD_GPU in caplog.text


def test_a_wish_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quant is fp8, but this GPU.* 8\.0") as refused:
        resolve_quant("fp8", "fp8", OLD_GPU)
    assert refused.value.param == "quant"
    with pytest.raises(ConfigError, match="kv_dtype is fp8, but") as refused:
        resolve_kv_dtype("fp8", torch.bfloat16, OLD_GPU)
    assert refused.value.param == "kv_dtype"


def test_the_cache_is_as_the_activations_unless_asked_otherwise() -> None:
    assert name(resolve_kv_dtype("auto", torch.bfloat16, OLD_GPU)) == "bfloat16"
    assert name(resolve_kv_dtype("fp8", torch.bfloat16, None)) == "fp8"


def test_a_cpu_has_no_fp8() -> None:
    assert fp8_obstacle(torch.device("cpu"), has_triton=True) is not None


def test_a_cache_in_int8_is_for_cpus() -> None:
    cpu, gpu = (int8_kv_obstacle(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert name(resolve_kv_dtype("int8", torch.float32, None, cpu)) == "int8"
    with pytest.raises(ConfigError, match=r"kv_dtype is int8, but a GPU .* use fp8") as refused:
        resolve_kv_dtype("int8", torch.bfloat16, None, gpu)
    assert refused.value.param == "kv_dtype"


@pytest.mark.parametrize(
    ("capability", "has_triton", "can"), [((8, 0), True, False), ((8, 9), True, True), ((9, 0), False, False)]
)
def test_a_gpu_has_fp8_if_it_is_new_enough_and_has_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_triton: bool, can: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (fp8_obstacle(torch.device("cuda"), has_triton=has_triton) is None) == can
