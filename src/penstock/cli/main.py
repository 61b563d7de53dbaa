"""The `penstock` command."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from penstock import __version__
from penstock.cli.admins import add_admins, run_admins
from penstock.cli.alerts import add_alerts, run_alerts
from penstock.cli.bench import add_bench, run_bench
from penstock.cli.command_parser import CommandParser
from penstock.cli.doctor import add_doctor, run_doctor
from penstock.cli.flags import MOST_USED, add_settings, settings_from
from penstock.cli.gateway import add_gateway
from penstock.cli.keys import add_keys, run_keys
from penstock.cli.logs import configure_logs
from penstock.cli.plan import add_plan, run_plan
from penstock.cli.quantize import add_quantize, run_quantize
from penstock.cli.replay import add_replay, run_replay
from penstock.cli.replica_commands import add_replicas, run_replicas
from penstock.cli.routes import add_routes, run_routes
from penstock.cli.sim import add_sim, run_sim
from penstock.cli.tenants import add_tenants, run_tenants
from penstock.cli.top import add_top, run_top
from penstock.cli.usage import add_usage, run_usage
from penstock.cli.watermark import add_watermark, run_watermark
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import in_words
from penstock.observe.redaction import redact

_SERVE = """\
examples:
  penstock serve                                   # a small model, at http://127.0.0.1:8000
  penstock serve hf:Qwen/Qwen3-8B --port 9000      # a model of the Hugging Face Hub
  penstock serve model.gguf --max-model-len 8192   # a file; a shorter context takes less memory
  penstock serve --replicas 2                      # two of it behind a gateway"""
_ENGINE = """\
examples:
  penstock engine --port 9001                      # name http://127.0.0.1:9001 in a gateway's file
  PENSTOCK_GATEWAY_SECRET=... penstock engine hf:Qwen/Qwen3-8B --host 0.0.0.0"""


@cache  # five hundred arguments are 30 ms, and to parse changes none of them
def parser() -> argparse.ArgumentParser:
    root: argparse.ArgumentParser = CommandParser("penstock", description="LLM serving, from the GPU up to the fleet.")
    root.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for name, text, examples in (
        ("serve", "serve a model over the OpenAI API: all that one machine needs", _SERVE),
        ("engine", "one replica, an engine and its server, to stand behind a gateway", _ENGINE),
    ):
        command = commands.add_parser(
            name,
            help=text,
            usage="%(prog)s [MODEL] [FLAGS]",
            description=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        groups = add_settings(command)
        if name == "serve":
            groups[MOST_USED].add_argument(
                "--replicas", type=int, default=1, metavar="N", help="with more than one, behind a gateway (default: 1)"
            )
            command.add_argument_group("gateway in front of --replicas").add_argument(
                "--processes", type=int, default=1, metavar="N", help="workers that share its port (default: 1)"
            )
        else:
            command.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)  # for `serve --replicas`
        groups["logs and monitoring"].add_argument(
            "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="(default: info)"
        )
        command.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this page and end")

    pull = commands.add_parser("pull", help="fetch a model into the cache")
    pull.add_argument("model", metavar="MODEL", help="an alias, or hf:org/name")

    convert = commands.add_parser("convert", help="write a model in another format")
    convert.add_argument(
        "model", metavar="MODEL", help="an alias, a .gguf file, a Hugging Face directory, or hf:org/name"
    )
    convert.add_argument("directory", type=Path, metavar="DIR", help="where to write")
    convert.add_argument("--to", choices=["hf"], default="hf", help="the format: a Hugging Face directory")
    convert.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add_quantize(commands)
    add_bench(commands)
    add_gateway(commands)
    add_tenants(commands)
    add_keys(commands)
    add_usage(commands)
    add_admins(commands)
    add_routes(commands)
    add_replicas(commands)
    add_alerts(commands)
    add_top(commands)
    add_doctor(commands)
    add_replay(commands)
    add_plan(commands)
    add_sim(commands)
    add_watermark(commands)
    return root


def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    configure_logs(getattr(arguments, "log_level", "info"))
    try:
        try:
            run(arguments)
        finally:
            sys.stdout.flush()
    except PenstockError as error:
        sys.exit(f"penstock: {redact(error.message)}")
    except BrokenPipeError:  # of `| head`, which has what it wants
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        logging.getLogger("penstock").debug("the command failed", exc_info=True)
        if error.filename is None:
            _drop_output()
        sys.exit(f"penstock: {redact(in_words(error))}")
    except KeyboardInterrupt:
        sys.exit(130)


def _drop_output() -> None:
    """Drop what standard output did not take, or Python would fail over it once more when it ends."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: argparse.Namespace) -> None:
    """Each command imports what it needs: `--help` and `pull` stay quick."""
    match arguments.command:
        case "serve" if arguments.replicas > 1:
            from penstock.cli.replicas import serve_replicas

            serve_replicas(settings_from(arguments), arguments.replicas, arguments.processes)
        case "serve" if arguments.processes > 1:
            raise ConfigError("--processes is for the gateway of --replicas: there is none in front of one replica")
        case "engine" if arguments.report_fd is not None:
            from penstock.cli.start_report import serve_and_report

            serve_and_report(settings_from(arguments), arguments.report_fd)
        case "serve" | "engine":
            from penstock.cli.serve import serve

            serve(settings_from(arguments), has_console=arguments.command == "serve")
        case "pull":
            from penstock.hub.progress import ProgressBar
            from penstock.hub.resolve import resolve

            print(resolve(arguments.model, progress=ProgressBar()).path)
        case "convert":
            from penstock.cli.convert import convert

            convert(arguments.model, arguments.directory, arguments.dtype)
        case "quantize":
            run_quantize(arguments)
        case "bench":
            run_bench(arguments)
        case "sim":
            run_sim(arguments)
        case "gateway":
            from penstock.cli.gateway import run_gateway

            run_gateway(arguments)
        case "tenants":
            run_tenants(arguments)
        case "keys":
            run_keys(arguments)
        case "usage":
            run_usage(arguments)
        case "admins":
            run_admins(arguments)
        case "routes":
            run_routes(arguments)
        case "replicas":
            run_replicas(arguments)
        case "alerts":
            run_alerts(arguments)
        case "top":
            run_top(arguments)
        case "doctor":
            run_doctor(arguments)
        case "replay":
            run_replay(arguments)
        case "plan":
            run_plan(arguments)
        case "watermark":
            run_watermark(arguments)


if __name__ == "__main__":
    main()
