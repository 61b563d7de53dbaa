"""Functions that tests run in processes of their own: `python -m tests.tenancy.children NAME URL …`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.core.errors import Unauthenticated
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.follower import Follower
from penstock.tenancy.journal import Journal
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.ledger import Ledger
from penstock.tenancy.store import open_store
from penstock.tenancy.usage import Usage
from tests.waiting import GIVE_UP_S, eventually


def child(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.tenancy.children", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def run_at_once(children: list[subprocess.Popen[str]]) -> None:
    """Each says that it is ready, and waits for all to be; none may fail."""
    assert [line_from(process) for process in children] == ["ready"] * len(children)
    for process in children:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in children:
        _, complaint = process.communicate(timeout=GIVE_UP_S)
        assert process.returncode == 0, complaint


def say(text: str) -> None:
    print(text, flush=True)


def administer(url: str, name: str, num_rounds: str) -> None:
    """Tenants and keys come and go, and everybody changes the one tenant that all share."""
    say("ready")
    sys.stdin.readline()  # so that all begin at once, with opening the store
    with open_store(url) as store:
        for index in range(int(num_rounds)):
            store.add_tenant({"id": f"{name}-{index}"})
            keys = [store.create_key(f"{name}-{index}") for _ in range(2)]
            store.revoke_key(keys[0].record.id)
            store.update_tenant("shared", {"limits": {"max_input" if name == "a" else "max_output": index + 1}})


def follow(url: str, key: str) -> None:
    """Says when a key works here, and when it no longer does."""
    ring = KeyRing()

    def works() -> bool:
        try:
            ring.authenticate(key.encode(), time.time())
        except Unauthenticated:
            return False
        return True

    with open_store(url) as store, Follower(store, ring.apply):
        assert works()
        say("works")
        eventually(works, lambda does: not does)
        say("refused")


def admit(url: str, tenant: str) -> None:
    """Adds a tenant and says its key."""
    with open_store(url) as store:
        store.add_tenant({"id": tenant})
        say(store.create_key(tenant).secret)


def use(url: str, prefix: str) -> None:
    """Records usage for ever, saying how many requests its ledger has written down so far."""
    with open_store(url) as store, Ledger(store.usage, Budgets(), interval_s=0.02) as ledger:
        for number in itertools.count():
            ledger.record(Usage(f"{prefix}-{number}", "acme", "key", "m", time.time(), input_tokens=3, output_tokens=4))
            say(str(ledger.num_written))


def journal(url: str, directory: str, point: str, num_records: str, prefix: str = "r") -> None:
    """Records so many requests, says so at the chosen point, and waits to be killed: when they are `recorded`, or when
    the store has `written` them and the journal has not been told."""

    class Paused(Journal):
        def confirm(self) -> None:
            say("written")
            time.sleep(GIVE_UP_S)

    with open_store(url) as store:
        ledger = Ledger(store.usage, Budgets(), Paused(Path(directory)), interval_s=GIVE_UP_S).start()
        for number in range(int(num_records)):
            id = f"{prefix}-{number}"
            ledger.record(Usage(id, "acme", "key", "m", time.time(), input_tokens=3, output_tokens=4))
        if point == "written":
            ledger.tick()
        say("recorded")
        time.sleep(GIVE_UP_S)


def settle(url: str, num_rounds: str) -> None:
    """Reports the same requests as everybody else, some in another order."""
    say("ready")
    sys.stdin.readline()
    with open_store(url) as store:
        for index in range(int(num_rounds)):
            batch = [Usage(f"r-{index}-{i}", f"t-{i % 7}", "key", "m", time.time(), input_tokens=1) for i in range(50)]
            store.usage.append(reversed(batch) if os.getpid() % 2 else batch, now_s=time.time())


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "administer": administer,
        "follow": follow,
        "admit": admit,
        "use": use,
        "journal": journal,
        "settle": settle,
    }
    programs[sys.argv[1]](*sys.argv[2:])
