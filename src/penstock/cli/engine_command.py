"""`penstock engine MODEL`: one replica that stands behind a gateway."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.flags import add_replica_flags, settings_from

_EXAMPLES = """\
examples:
  penstock engine --port 9001                      # name http://127.0.0.1:9001 in a gateway's file
  PENSTOCK_GATEWAY_SECRET=... penstock engine hf:Qwen/Qwen3-8B --host 0.0.0.0"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    groups = add_replica_flags(parser, _EXAMPLES)
    groups["logs and monitoring"].add_argument(
        "--address-file", type=Path, metavar="FILE", help="JSON with its URL, written when it listens"
    )
    parser.add_argument("--settings", help=argparse.SUPPRESS)  # JSON, for drivers that start it elsewhere
    parser.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)  # for `serve --replicas`
    parser.add_argument("--lease-fd", type=int, help=argparse.SUPPRESS)  # for actors of Ray


def run(arguments: argparse.Namespace) -> None:
    if arguments.lease_fd is not None:
        from penstock.cli.lease_pipe import end_with_holder

        end_with_holder(arguments.lease_fd)
    settings = settings_from(arguments)
    if arguments.report_fd is not None:
        from penstock.cli.start_report import serve_and_report

        serve_and_report(settings, arguments.report_fd)
    else:
        from penstock.cli.serve import serve

        serve(settings, has_console=False, address_file=arguments.address_file)
