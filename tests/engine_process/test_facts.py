from dataclasses import replace

import pytest

from penstock.capacity.shapes import shape
from penstock.core.parallelism import Parallelism
from penstock.engine_process.facts import peaks_of, rank_reads, weight_bytes, work_of

CONFIG = shape("llama8b")


def test_a_device_that_was_measured_has_peaks() -> None:
    peaks = peaks_of("NVIDIA H200")
    assert peaks is not None
    assert peaks.bytes_per_s == pytest.approx(4.41e12)
    assert peaks_of("") is None


def test_weights_are_read_in_their_own_format() -> None:
    wide, small = weight_bytes(CONFIG, "bfloat16", "none"), weight_bytes(CONFIG, "bfloat16", "fp8")
    assert wide == pytest.approx(15.0e9, rel=0.01)
    assert small < 0.6 * wide
    assert weight_bytes(CONFIG, "some_dot", "none") == 0


def test_on_a_gpu_reading_context_weighs_more_than_on_a_cpu() -> None:
    gpu, cpu = (work_of(CONFIG, device, 131_072, None) for device in ("cuda", "cpu"))
    assert gpu.token == cpu.token == pytest.approx(14e9, rel=0.05)
    assert gpu.read > 10 * cpu.read
    assert work_of(CONFIG, "cuda", 131_072, peaks_of("NVIDIA H200")).read == pytest.approx(gpu.read, rel=0.01)


def test_ranks_together_read_what_one_would() -> None:
    """Norms are whole on every rank: they are few. The last stage has the head."""
    stages = [range(17), range(17, 32)]
    reads = rank_reads(CONFIG, "bfloat16", "none", Parallelism(tp=2, pp=2), stages, 131_072)
    assert len(reads) == 4
    assert sum(one.weight_bytes for one in reads) == pytest.approx(weight_bytes(CONFIG, "bfloat16", "none"), rel=0.001)
    assert sum(one.kv_token_bytes for one in reads) == 131_072
    layer_bytes = (weight_bytes(CONFIG, "bfloat16", "none") - 2 * CONFIG.vocab_size * CONFIG.hidden_size) / 32
    assert reads[0].weight_bytes == pytest.approx(17 * layer_bytes / 2, rel=0.001)
    assert reads[2].weight_bytes == pytest.approx(
        15 * layer_bytes / 2 + CONFIG.vocab_size * CONFIG.hidden_size, rel=0.001
    )


def test_the_rank_with_more_heads_reads_more() -> None:
    three = replace(CONFIG, num_heads=6, num_kv_heads=3)
    first, second = rank_reads(three, "bfloat16", "none", Parallelism(tp=2), [range(32)], 3000)
    assert (first.kv_token_bytes, second.kv_token_bytes) == (1000, 2000)
    assert first.weight_bytes < second.weight_bytes


def test_nobody_knows_what_ranks_of_an_unknown_format_read() -> None:
    assert rank_reads(CONFIG, "some_dot", "none", Parallelism(tp=2), [range(32)], 3000) == ()
    assert rank_reads(CONFIG, "bfloat16", "none", Parallelism(), [range(32)], 3000) == ()
