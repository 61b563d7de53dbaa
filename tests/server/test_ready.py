"""The words of a server that is ready."""

from __future__ import annotations

import msgspec

from penstock.core.measurements import ServingLimits
from penstock.engine.client import startup_phases
from penstock.engine.messages import EngineInfo
from penstock.server.ready import ready_message

INFO = EngineInfo(
    device="cpu",
    number_format="bfloat16",
    quant="q4",
    kv_dtype="bfloat16",
    kernels="native",
    limits=ServingLimits(
        max_num_seqs=64, chunk_tokens=512, max_model_len=2048, block_size=16, kv_capacity_tokens=65_536
    ),
    kv_bytes=64 << 20,
    startup_s={"import": 1.04, "files": 0.004, "weights": 0.26},
)


def test_one_replica_says_its_settings_and_how_to_try_it() -> None:
    said = ready_message(
        "m", INFO, "http://127.0.0.1:8000", f"ready in 1.3 s: {startup_phases(INFO.startup_s)}", has_console=True
    )
    assert said.splitlines()[1:9] == [
        "penstock serves m at http://127.0.0.1:8000   (ready in 1.3 s: import 1.04, weights 0.26)",
        "",
        "  device          cpu, native kernels, bfloat16, q4 weights",
        "  KV cache        4,096 blocks of 16 tokens, 64 MiB, bfloat16",
        "  max_num_seqs    64",
        "  chunk_tokens    512",
        "  max_model_len   2048",
        "  speculation     off",
    ]
    assert "Try it, here or in a browser at http://127.0.0.1:8000:" in said
    assert "  curl -N http://127.0.0.1:8000/v1/chat/completions -d '{" in said


def test_several_ranks_say_how_they_share_the_model_and_why() -> None:
    info = msgspec.structs.replace(
        INFO, parallelism=("tensor parallel 4: 32.9 GiB a rank", "not fewer: TP1: too large")
    )
    said = ready_message("m", info, "http://127.0.0.1:8000", "ready", has_console=False).splitlines()
    assert said[4:6] == [
        "  parallelism     tensor parallel 4: 32.9 GiB a rank",
        "                  not fewer: TP1: too large",
    ]


def test_gateway_with_tenants_says_that_a_key_is_needed() -> None:
    said = ready_message("m", INFO, "https://[::1]:8000", "ready", has_console=False, num_replicas=2, needs_key=True)
    assert "  replicas        2 behind a gateway, each with:" in said
    assert "  curl -N https://[::1]:8000/v1/chat/completions -H 'authorization: Bearer KEY' -d '{" in said
    assert "browser" not in said
