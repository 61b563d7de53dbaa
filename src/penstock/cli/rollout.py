"""`penstock rollout`: a new version takes over step by step, and goes back by itself if it is worse."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.store_flags import add_store_flags, print_json, show_time, store_from
from penstock.rollout.desk import find, find_on, plan_of, rollout_document, start_rollout, story_of
from penstock.rollout.policy.sentences import sentence
from penstock.rollout.policy.state import StoryEntry
from penstock.rollout.runner import gates_of, state_of
from penstock.tenancy.rollouts import Rollout, RolloutVerb
from penstock.tenancy.store import Store
from penstock.terminal.tables import print_table

_BY = "command"
_WATCH_S = 2.0
_VERBS = {
    "start": "roll a version out: it gets copies, then clients step by step, as long as no gate finds it worse",
    "status": "how rollouts stand: step, gates with their ratios and intervals, and why",
    "story": "all that happened to one, with the numbers that it was decided by",
    "plan": "the plan for a model, as a file: what follows from its objectives, with a file's changes over it",
    "pause": "leave the shares as they are; a gate that finds the new version worse aborts all the same",
    "resume": "go on: the step begins again",
    "promote": "pass the step that is on; --all: all clients at once",
    "abort": "back to the shares from before, at once",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in _VERBS.items():
        command = verbs.add_parser(verb, help=text)
        if verb in ("start", "plan"):
            command.add_argument("model", metavar="MODEL")
        else:
            nargs = "?" if verb == "status" else None
            command.add_argument("model", metavar="MODEL", nargs=nargs, help="a model, or a rollout's id")
        if verb == "start":
            command.add_argument("--to", required=True, metavar="VERSION", help="the new version")
            command.add_argument(
                "--from", dest="old", metavar="VERSION", help="the old one (default: the one with most of the traffic)"
            )
        if verb in ("start", "plan"):
            command.add_argument("--plan", type=Path, metavar="FILE", help="YAML: what differs from the default plan")
        if verb == "status":
            command.add_argument("--watch", action="store_true", help="print it again whenever it changes")
            command.add_argument("--all", action="store_true", help="those that are over, too")
        if verb == "promote":
            command.add_argument("--all", action="store_true", help="all clients at once, whatever is left of the plan")
        if verb in ("pause", "resume", "promote", "abort"):
            command.add_argument("--reason", default="", metavar="TEXT", help="for the story")
        add_store_flags(command)


def run(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        match arguments.verb:
            case "start":
                rollout = start_rollout(
                    store,
                    arguments.model,
                    arguments.to,
                    old=arguments.old,
                    plan=_plan_values(arguments.plan),
                    by=_BY,
                )
                _tell(rollout, arguments.json)
            case "status":
                _status(store, arguments)
            case "story":
                _story(find(store.rollouts, arguments.model), store, arguments.json)
            case "plan":
                plan = plan_of(store.routes.show(arguments.model), _plan_values(arguments.plan))
                if arguments.json:
                    print_json(plan)
                else:
                    print(plan.yaml(), end="")
            case verb:
                found = find_on(store.rollouts, arguments.model)
                is_full = verb == "promote" and arguments.all
                given = store.rollouts.give(
                    found.id, RolloutVerb(verb), by=_BY, is_full=is_full, reason=arguments.reason
                )
                _tell(given, arguments.json)


def _plan_values(path: Path | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    from penstock.cli.config_file import read_config_file

    return read_config_file(path).values


def _tell(rollout: Rollout, as_json: bool) -> None:
    if as_json:
        print_json(rollout_document(rollout))
        return
    ordered = f", {rollout.command.verb} ordered" if rollout.command is not None else ""
    print(f"rollout {rollout.id}: {rollout.model} from {rollout.old} to {rollout.new}: {rollout.phase}{ordered}")


def _status(store: Store, arguments: argparse.Namespace) -> None:
    last: object = None
    while True:
        found = _asked(store, arguments)
        shown = [(one.id, one.revision) for one in found]
        if shown != last:
            _print_status(found, arguments.json)
            sys.stdout.flush()
        last = shown
        if not arguments.watch or (found and all(one.is_over for one in found)):
            return
        time.sleep(_WATCH_S)


def _asked(store: Store, arguments: argparse.Namespace) -> list[Rollout]:
    if arguments.model is not None:
        return [find(store.rollouts, arguments.model)]
    return store.rollouts.all() if arguments.all else store.rollouts.on()


def _print_status(found: list[Rollout], as_json: bool) -> None:
    if as_json:
        print_json([rollout_document(one) for one in found])
        return
    if not found:
        print("no rollout is on: `penstock rollout start MODEL --to VERSION` begins one")
        return
    print_table(
        ("ROLLOUT", "MODEL", "FROM", "TO", "PHASE", "STEP", "STARTED", "BY"),
        [
            (
                one.id,
                one.model,
                one.old,
                one.new,
                one.phase + (f" ({one.command.verb} ordered)" if one.command is not None else ""),
                _step(one),
                show_time(one.started_at),
                one.by or "-",
            )
            for one in found
        ],
    )
    if len(found) == 1:
        _print_gates(found[0])


def _print_gates(rollout: Rollout) -> None:
    document = rollout_document(rollout)
    print(f"\n{document['reason']}")
    if document.get("hands_off"):
        print("the route's shares were changed by hand: `penstock rollout resume` orders the step's anew")
    if rollout.is_over:
        return
    try:
        gates, old = gates_of(rollout), state_of(rollout).old
    except (ValueError, TypeError):
        return
    if gates:
        print()
        for gate in gates:
            print(f"  {sentence(gate, old)}")


def _step(rollout: Rollout) -> str:
    try:
        state = state_of(rollout)
    except (ValueError, TypeError):
        return "-"
    return f"{state.step + 1} of {len(state.plan.steps)}, {state.current_step.title}"


def _story(rollout: Rollout, store: Store, as_json: bool) -> None:
    entries = story_of(store.rollouts, rollout.id)
    if as_json:
        print_json(entries)
        return
    print(f"rollout {rollout.id} of {rollout.model}, from {rollout.old} to {rollout.new}\n")
    for entry in entries:
        print(_entry_line(entry))
        for gate in entry.gates:
            print(f"    {sentence(gate, rollout.old)}")


def _entry_line(entry: StoryEntry) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.at))
    return f"{at}  step {entry.step + 1}  {entry.what}: {entry.reason}"
