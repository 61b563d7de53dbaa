"""A watch under faults: whatever happens to its connection, it ends with what the server has."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi
from penstock.http.kubernetes_watch import KubernetesWatch
from tests.fake_kubernetes import FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.waiting import eventually_async

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
async def server() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as found:
        yield found


@pytest.fixture
async def api(server: FakeKubernetes, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    found = KubernetesApi(ClusterSettings(str(write_kubeconfig(tmp_path / "kubeconfig", server.url))))
    yield found
    await found.close()


async def create(api: KubernetesApi, name: str, **labels: str) -> None:
    metadata = {"name": name, "labels": {"app": "m", **labels}}
    await api.request("POST", PODS, body={"metadata": metadata, "spec": {"containers": [{"name": "c"}]}})


def versions(watch: KubernetesWatch) -> dict[str, str]:
    return {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in watch.objects.values()}


@pytest.mark.parametrize("seed", range(3))
async def test_a_watch_ends_with_what_the_server_has(seed: int, server: FakeKubernetes, api: KubernetesApi) -> None:
    chance = random.Random(seed)
    watch = KubernetesWatch(api, lambda: PODS, "app=m")
    watch.start()
    names: list[str] = []
    for number in range(60):
        match chance.choice(["create", "create", "change", "delete", "drop", "forget", "blink"]):
            case "create":
                names.append(f"p{number}")
                await create(api, names[-1])
            case "change" if names:
                await api.merge(f"{PODS}/{chance.choice(names)}", {"metadata": {"annotations": {"n": str(number)}}})
            case "delete" if names:
                await api.request("DELETE", f"{PODS}/{names.pop(chance.randrange(len(names)))}")
            case "drop":
                server.drop_watches()
            case "forget":
                server.forget_history()
                server.drop_watches()
            case "blink":
                server.go_down()
                await eventually_async(lambda: not server.num_watches)
                server.come_up()
    listed = await api.request("GET", PODS, query={"labelSelector": "app=m"})
    wanted = {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in listed["items"]}
    assert sorted(wanted) == sorted(names)
    await eventually_async(lambda: versions(watch), lambda found: found == wanted)
    await watch.close()


async def test_an_answer_that_is_older_than_what_was_seen_changes_nothing(
    server: FakeKubernetes, api: KubernetesApi
) -> None:
    watch = KubernetesWatch(api, lambda: PODS, "app=m")
    await create(api, "p")
    old = await api.request("GET", f"{PODS}/p")
    await api.merge(f"{PODS}/p", {"metadata": {"annotations": {"new": "yes"}}})
    (known,) = (await watch.current()).values()
    watch.put(old)
    assert [*watch.objects.values()] == [known]
    await api.request("DELETE", f"{PODS}/p")
    await eventually_async(lambda: not watch.objects)
    watch.put(known)
    assert not watch.objects
    await watch.close()
