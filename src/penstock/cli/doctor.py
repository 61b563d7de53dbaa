"""`penstock doctor`: looks an installation over and says what to fix, a line for each thing it looked at."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.doctor.findings import Finding

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="to be served here: are its files complete, does it fit"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML of `penstock serve`, `gateway` or `fleet`")
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="the cluster of the kubeconfig, or of this pod, for gateways and a fleet",
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: in a pod its service account, else KUBECONFIG")
    parser.add_argument("--context", help="of the kubeconfig (default: its current one)")
    parser.add_argument("--ray", action="store_true", help="the Ray cluster at --address, for a fleet")
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of Ray's head (default: auto, or the file's); with a fleet's file on Kubernetes, a kubeconfig's context",
    )
    parser.add_argument(
        "--namespace", help="of the pods (default: the context's, or the pod's own), or of Ray's actors"
    )
    parser.add_argument("--store", metavar="URL", help="see `penstock gateway`")
    parser.add_argument(
        "--url",
        metavar="URL",
        help="of a gateway or replica that runs, and nothing else: is it ready, which models has it, does MODEL (or "
        "the first) answer; a tenant's key is in $PENSTOCK_API_KEY",
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", help="with --url: PEM file of CAs to trust (default: the system's)"
    )
    parser.add_argument("--server-name", metavar="NAME", help="with --url: what the certificate is good for")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="with --url: of an answer (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> None:
    """Ends with 1 if something must be fixed."""
    findings = []
    for finding in _looked_at(arguments):
        findings.append(finding)
        if not arguments.json:
            print(line(finding), flush=True)  # as it is found: some checks take a while
    if arguments.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in _MARKS}
        print(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} to fix")
    if any(one.verdict == "fail" for one in findings):
        sys.exit(1)


def _looked_at(arguments: argparse.Namespace) -> Iterator[Finding]:
    from penstock.cli.config_file import read_config_file
    from penstock.cli.store_flags import store_url
    from penstock.doctor.checks import look_over
    from penstock.doctor.cluster import ClusterUse
    from penstock.doctor.endpoint import KEY_VARIABLE, Endpoint, endpoint
    from penstock.doctor.ray import RayUse
    from penstock.http.kubernetes_api import ClusterSettings

    if arguments.url is not None:
        key, model = os.environ.get(KEY_VARIABLE), arguments.model
        return endpoint(
            Endpoint(arguments.url, key, model, arguments.ca_file, arguments.server_name, arguments.timeout)
        )
    read = partial(read_config_file, arguments.config) if arguments.config is not None else None
    default_store = store_url(None, None)
    use: ClusterUse | RayUse | None = None
    if arguments.kubernetes:
        there = ClusterSettings(arguments.kubeconfig, arguments.context, arguments.namespace)
        use = ClusterUse(there, drives=True, lease="penstock")
    elif arguments.ray:
        store = arguments.store or default_store
        use = RayUse(arguments.address or "auto", arguments.namespace or "penstock", store=store)
    chosen = {"driver": "ray" if arguments.ray else None, "address": arguments.address}
    return look_over(arguments.model, read, arguments.store, default_store, use, chosen)


def line(finding: Finding) -> str:
    hint = f": {finding.hint}" if finding.hint else ""
    return f"{_MARKS[finding.verdict]}  {finding.name:<12} {finding.says}{hint}"
