from __future__ import annotations

import pytest

from penstock.capacity.hardware import by_driver_name, find_gpu, hardware
from penstock.core.errors import ConfigError

OWN = """
h100.price_per_hour = 1.99

[mine]
name = "My GPU"
price_per_hour = 1
memory_gib = 96
bandwidth_tb_s = 1.8
tflops = { bfloat16 = 500 }
link_gb_s = 64
link_latency_us = 20
network_gb_s = 12.5
per_node = 4
"""


def test_a_file_adds_gpus_and_overrides_single_figures() -> None:
    shipped, table = hardware(), hardware(OWN)
    assert table["h100"].price_per_hour == 1.99
    assert table["h100"].memory_gib == shipped["h100"].memory_gib
    assert table["mine"].per_node == 4
    assert table["h200"] == shipped["h200"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100.prise_per_hour = 2", "did you mean 'h100.price_per_hour'"),
        ("h100.price_per_hour = 0", "h100.price_per_hour"),
        ("h100.tflops = { fp8 = 100 }", "bfloat16"),
        ("mine.price_per_hour = 2", "mine"),
        ("h100 = 1", "does not hold GPUs by name"),
        ("{", "is not TOML"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hardware(text)


def test_an_unknown_gpu_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        find_gpu(hardware(), "H20O")


def test_a_driver_names_what_was_measured() -> None:
    found = by_driver_name("NVIDIA H200")
    assert found is not None
    assert found.measured is not None
    assert by_driver_name("an abacus") is None
