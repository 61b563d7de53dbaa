from prometheus_client.parser import text_string_to_metric_families

from penstock.observe.catalog import Metric
from penstock.observe.merge import merged
from penstock.observe.registry import Registry

OPEN = Metric("open", "gauge", "Requests now.")
ENDED = Metric("ended_total", "counter", "Requests that ended.", ("model",))
TOOK = Metric("took_seconds", "histogram", "How long they took.", (), (1.0, 2.0))


def exposition(num_open: int, model: str) -> str:
    registry = Registry([OPEN, ENDED, TOOK])
    registry.count(OPEN).value = num_open
    registry.count(ENDED, model).value = 3
    registry.spread(TOOK).observe(1.5)
    return registry.exposition().decode()


def test_series_of_all_processes_stand_in_one_family_with_a_label_each() -> None:
    strange = 'a {"b"}\u2028,c'
    text = merged({"0": exposition(1, "small"), "1-draining": exposition(2, strange)}, "worker")
    families = list(text_string_to_metric_families(text))
    assert [family.name for family in families] == ["open", "ended", "took_seconds"]
    opened, ended, took = families
    assert [(one.labels, one.value) for one in opened.samples] == [({"worker": "0"}, 1), ({"worker": "1-draining"}, 2)]
    assert [one.labels for one in ended.samples] == [
        {"worker": "0", "model": "small"},
        {"worker": "1-draining", "model": strange},
    ]
    assert {one.labels["worker"] for one in took.samples} == {"0", "1-draining"}
    assert text.count("# HELP open ") == text.count("# TYPE open ") == 1


def test_family_that_one_process_has_alone_is_kept() -> None:
    """Workers of two versions run side by side while one replaces the other."""
    newer = Registry([ENDED, OPEN]).exposition().decode()
    older = Registry([OPEN]).exposition().decode()
    text = merged({"0": older, "1": newer}, "worker")
    assert text.index("# TYPE open") < text.index('open{worker="1"} 0') < text.index("# TYPE ended_total")
