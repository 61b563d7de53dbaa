from __future__ import annotations

import math

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from penstock.dialects import exposition
from penstock.dialects.dialect import Series, Signal
from penstock.dialects.exposition import samples
from tests.dialects import expositions


def read(text: bytes, series: Series) -> float | None:
    return exposition.read(text, {Signal.RUNNING: series})[Signal.RUNNING]


def test_a_name_that_begins_like_another_is_not_the_other() -> None:
    text = b'a_total 1\na 2\na_b 3\na{x="1"} 4\n'
    assert [value for _, value in samples(text, ("a",))["a"]] == [2.0, 4.0]
    assert samples(text, ("a", "a_b", "b")).keys() == {"a", "a_b"}


def test_the_first_line_and_one_without_a_newline_count() -> None:
    assert read(b"a 1", Series(("a",))) == 1.0
    assert read(b"b 1\na 2", Series(("a",))) == 2.0


def test_times_exemplars_and_odd_spaces_are_no_part_of_the_number() -> None:
    assert read(b"a 1.5 1700000000000\n", Series(("a",))) == 1.5
    assert read(b'a{ x = "1" , } 2 # {trace_id="abc"} 0.67\n', Series(("a",), labels={"x": "1"})) == 2.0


def test_what_is_not_a_number_is_not_there() -> None:
    assert read(b"a NaN\n", Series(("a",))) is None
    assert read(b"a +Inf\n", Series(("a",))) is None
    assert read(b"a\n", Series(("a",))) is None
    assert read(b'a{x="1 2\n', Series(("a",))) is None
    assert read(b"", Series(("a",))) is None


def test_an_old_name_is_read_where_the_new_one_is_not() -> None:
    series = Series(("new", "old"))
    assert read(b"old 1\n", series) == 1.0
    assert read(b"old 1\nnew 2\n", series) == 2.0


def test_series_of_ranks_add_up_and_shares_do_not() -> None:
    text = b'a{rank="0"} 1\na{rank="1"} 2\n'
    assert read(text, Series(("a",))) == 3.0
    assert read(text, Series(("a",), join="max")) == 2.0


def test_info_metrics_carry_numbers_in_their_labels() -> None:
    assert read(expositions.VLLM, Series(("vllm:cache_config_info",), label="num_gpu_blocks")) == 2000.0
    assert read(expositions.VLLM, Series(("vllm:cache_config_info",), label="kv_cache_size_tokens")) is None


names = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
labels = st.text(max_size=12).filter(lambda text: "\r" not in text)


@given(st.dictionaries(names, st.tuples(labels, st.floats(allow_nan=False)), min_size=1, max_size=5))
def test_it_reads_what_the_official_client_writes(gauges: dict[str, tuple[str, float]]) -> None:
    registry = CollectorRegistry()
    for name, (label, value) in gauges.items():
        Gauge(name, "of \\ many \n kinds", ["x"], registry=registry).labels(label).set(value)
    text = prometheus_client.generate_latest(registry)
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert samples(text, (sample.name,)) == {sample.name: [(sample.labels, sample.value)]}
            number = read(text, Series((sample.name,), labels=dict(sample.labels)))
            assert number == (sample.value if math.isfinite(sample.value) else None)
