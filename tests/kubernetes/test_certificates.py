"""TLS on a real control plane: gateways and replicas with certificates as cert-manager's Secrets have them, asked by
the pod of `helm test`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.certificates import new_ca
from tests.kubernetes.namespaces import address, until
from tests.kubernetes.releases import POOL, REPLICA, Release

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.asyncio(loop_scope="module")]

DEPLOYED = "deployed"  # a pool whose replicas are a Deployment's


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(release: Release, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Release]:
    directory = tmp_path_factory.mktemp("ca")
    for name, host in (("gateway-tls", "penstock"), ("replica-tls", "penstock-replica")):
        await _make_secret(release, directory, name, f"{host}.{release.ns.name}.svc")
    await asyncio.to_thread(release.store.add_tenant, {"id": "acme"})
    pools = [release.pool(min=1, max=1), release.pool(DEPLOYED, min=1, max=1) | {"scaledBy": "none"}]
    tls = {
        "gateway": {"tls": {"secretName": "gateway-tls", "hasCa": True}},
        "replicaTls": {"secretName": "replica-tls"},
    }
    await release.install(*pools, more=tls)
    await until(lambda: release.ns.ready(**REPLICA), lambda found: len(found) == 2)
    await until(release.gateways, lambda found: len(found) == 2)
    yield release


async def test_replicas_are_asked_over_https_by_controller_and_gateways(secured: Release) -> None:
    pods = (await secured.ns.pods(**REPLICA)).values()
    assert {port["name"] for pod in pods for port in pod["spec"]["containers"][0]["ports"]} == {"https"}
    active = await until(secured.active)
    urls = {f"https://{address(pod)}:8000" for pod in pods}
    assert {one.url for one in active.values()} <= urls


async def test_test_pod_has_an_answer_of_every_pool_with_the_key_from_the_secret(secured: Release) -> None:
    key = await asyncio.to_thread(secured.store.create_key, "acme")
    await _set_key(secured, key.secret)
    for gateway in (await secured.gateways()).values():
        for model in (POOL, DEPLOYED):
            phase, said = await secured.run_test(gateway, model)
            assert phase == "Succeeded", said
            assert f"ok    answer       {model} made 4 tokens" in said


async def test_test_pod_fails_with_a_clear_line_where_the_key_is_wrong(secured: Release) -> None:
    await _set_key(secured, "psk_wrong")
    gateway = next(iter((await secured.gateways()).values()))
    phase, said = await secured.run_test(gateway, POOL)
    assert phase == "Failed"
    assert "FAIL  models" in said
    assert "the key in $PENSTOCK_API_KEY is not good for it" in said


async def _make_secret(release: Release, directory: Path, name: str, host: str) -> None:
    ca = await asyncio.to_thread(new_ca, directory, f"{name}-ca")
    own = await asyncio.to_thread(ca.issue, name, 90, f"DNS:{host}")
    files = {"tls.crt": own.cert, "tls.key": own.key, "ca.crt": ca.cert}
    data = {key: _encoded(path.read_text()) for key, path in files.items()}
    await release.ns.create("Secret", name, type="kubernetes.io/tls", data=data)


async def _set_key(release: Release, key: str) -> None:
    path = release.ns.path("Secret", "penstock")
    await release.ns.api.patch(path, {"data": {"client-key": _encoded(key)}})


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
