"""The store's part of rollouts: which are on, what gateways measured for them, and what was decided and why.

A rollout's plan and state are documents of the policy, which are kept here as they are. Everything that belongs
together is written in one transaction: state, story, what gateways are to measure and the route's shares. Whoever
writes names the revision that it has read; a change in between refuses the write.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from penstock.core.errors import Conflict, InvalidValue, RolloutNotFound
from penstock.core.rollout import Block, RolloutOrder
from penstock.observe.background import count_error
from penstock.tenancy.database import Database, Execute
from penstock.tenancy.revisions import next_revision
from penstock.tenancy.routes import RouteBook, RouteInForce, SharesAsked, refuse_unknown

FEEDBACK_KEPT_S = 7 * 24 * 3600.0
MAX_COMMENT = 2000  # characters
MAX_BLOCKS = 500  # that are read at once
MAX_KEPT = 200  # rollouts of a model that are over
_EMPTY = Raw(b"{}")
_block_decoder = msgspec.json.Decoder(Block)


class RolloutVerb(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ABORT = "abort"


class RolloutCommand(Struct, frozen=True):
    """An operator's order that the runner has not taken yet."""

    number: int  # grows with each order of its rollout
    verb: RolloutVerb
    by: str
    at: float  # seconds since 1970
    is_full: bool = False  # with promote: all steps that are left, at once
    reason: str = ""


class Rollout(Struct, frozen=True, omit_defaults=True):
    id: str
    model: str  # the route
    old: str  # versions
    new: str
    order: RolloutOrder
    state: Raw = _EMPTY  # a `rollout.policy.state.RolloutState`, which has the plan
    gates: Raw = Raw(b"[]")  # as they are now: `rollout.policy.state.GateResult`s
    phase: str = ""  # the state's, in a word
    is_ordered: bool = False  # it is as it is because an operator said so
    is_over: bool = False  # nothing is decided any more
    by: str = ""  # an admin's name
    started_at: float = 0.0  # seconds since 1970
    changed_at: float = 0.0
    ended_at: float | None = None
    begins_at: int = 0  # the route's revision before the rollout: an abort says it again
    route_revision: int = 0  # the route's last revision that the rollout wrote, or found at its start
    command: RolloutCommand | None = None
    num_commands: int = 0
    revision: int = 0


_rollout_decoder = msgspec.json.Decoder(Rollout)


class StoryEntry(Struct, frozen=True):
    number: int
    document: Raw


class Feedback(Struct, frozen=True):
    """A user's opinion of an answer: 0 bad, 1 good."""

    number: int  # in the order of commits
    tenant: str
    request_id: str
    score: float
    comment: str
    at: float


class RolloutBook:
    """Blocks: for commands and for threads of their own."""

    def __init__(self, database: Database, routes: RouteBook, clock: Callable[[], float]) -> None:
        self._database = database
        self._routes = routes
        self._clock = clock

    def start(self, rollout: Rollout, story: Iterable[Struct] = ()) -> Rollout:
        """One at a time for each model. Raises ModelNotFound, InvalidValue for a version that the route does not have,
        and Conflict."""
        with self._database.writing() as execute:
            changed = next_revision(self._database, execute)
            route = self._check(execute, rollout)
            now = self._clock()
            begun = replace(
                rollout,
                started_at=now,
                changed_at=now,
                begins_at=route.last.revision,
                route_revision=route.last.revision,
                revision=1,
            )
            execute(
                "INSERT INTO rollouts (id, model, started_at, is_over, revision, changed, num_blocks, document) "
                "VALUES (?, ?, ?, 0, 1, ?, 0, ?)",
                (begun.id, begun.model, now, changed, _encode(begun)),
            )
            _tell(execute, begun.id, story)
            self._forget_old(execute, begun.model)
        return begun

    def check(self, rollout: Rollout) -> None:
        """Raises as `start`, and writes nothing."""
        with self._database.reading() as execute:
            self._check(execute, rollout)

    def _check(self, execute: Execute, rollout: Rollout) -> RouteInForce:
        route = self._routes.show_within(execute, rollout.model)
        refuse_unknown(route.declared, dict.fromkeys((rollout.old, rollout.new)))
        if rollout.old == rollout.new:
            raise InvalidValue(f"'{rollout.new}' cannot be rolled out in place of itself", param="to")
        if on := execute("SELECT id FROM rollouts WHERE model = ? AND is_over = 0", (rollout.model,)):
            raise Conflict(
                f"rollout {on[0][0]} of '{rollout.model}' is on: it ends by itself, or by promote or abort",
                reason="rollout_on",
            )
        return route

    def get(self, id: str) -> Rollout:
        with self._database.reading() as execute:
            return _get(execute, id)

    def all(self, model: str | None = None) -> list[Rollout]:
        """The newest first."""
        where, parameters = ("WHERE model = ? ", (model,)) if model is not None else ("", ())
        with self._database.reading() as execute:
            return _rollouts(
                execute(f"SELECT document, revision FROM rollouts {where}ORDER BY started_at DESC", parameters)
            )

    def on(self) -> list[Rollout]:
        """Those that are not over."""
        with self._database.reading() as execute:
            return _rollouts(
                execute("SELECT document, revision FROM rollouts WHERE is_over = 0 ORDER BY started_at"),
            )

    def on_for(self, model: str) -> Rollout | None:
        return next((one for one in self.on() if one.model == model), None)

    def orders(self) -> tuple[RolloutOrder, ...]:
        """Returns what gateways have to know of the rollouts that are on."""
        with self._database.reading() as execute:
            return _orders(execute)

    # -- changes

    def change(
        self,
        after: Rollout,
        story: Iterable[Struct] = (),
        *,
        shares: SharesAsked | None = None,
        action: str = "",
        rolls_back: bool = False,
    ) -> Rollout:
        """Writes what a rollout is now. Raises Conflict if it is no longer at the revision of `after`."""
        with self._database.writing() as execute:
            return self.change_within(execute, after, story, shares=shares, action=action, rolls_back=rolls_back)

    def change_within(
        self,
        execute: Execute,
        after: Rollout,
        story: Iterable[Struct] = (),
        *,
        shares: SharesAsked | None = None,
        action: str = "",
        rolls_back: bool = False,
    ) -> Rollout:
        """The same in a transaction of somebody else's, as that of a lease's holder. `shares`: the route's from now on;
        `rolls_back`: as they were before the rollout."""
        is_news = rolls_back or shares is not None or after.is_over or after.order != _get(execute, after.id).order
        # The store's revision is locked before the rollout's row, by everybody who locks both.
        changed = next_revision(self._database, execute) if is_news else None
        before = _lock(execute, after.id)
        if before.revision != after.revision:
            raise Conflict(f"rollout {after.id} has changed meanwhile", reason="changed")
        now = self._clock()
        after = replace(after, revision=before.revision + 1, changed_at=now)
        if after.is_over:
            after = replace(after, ended_at=now, order=replace(after.order, is_over=True), command=None)
        by = _author(after)
        if rolls_back:
            route = self._roll_back(execute, after, by)
            after = replace(after, route_revision=route)
        elif shares is not None:
            revision = self._routes.change_within(execute, after.model, shares, action=action, by=by).last.revision
            after = replace(after, route_revision=revision)
        _write(execute, after, changed)
        _tell(execute, after.id, story)
        if after.is_over:
            execute("DELETE FROM rollout_blocks WHERE rollout = ?", (after.id,))
        return after

    def give(self, id: str, verb: RolloutVerb, *, by: str = "", is_full: bool = False, reason: str = "") -> Rollout:
        """Gives an operator's order, which the runner takes within a moment; the same twice is once. An abort has put
        the shares back when this returns, whether a runner is there or not. Raises Conflict for what is over, or is
        being aborted."""
        with self._database.writing() as execute:
            changed = next_revision(self._database, execute)
            before = _lock(execute, id)
            if before.is_over:
                raise Conflict(f"rollout {id} is over: {before.phase}", reason="over")
            given = before.command
            if given is not None and (given.verb, given.is_full) == (verb, is_full):
                return before
            if given is not None and given.verb is RolloutVerb.ABORT:
                raise Conflict(f"rollout {id} is being aborted", reason="aborting")
            number = before.num_commands + 1
            command = RolloutCommand(number, verb, by, self._clock(), is_full, reason)
            after = replace(before, command=command, num_commands=number, revision=before.revision + 1)
            if verb is RolloutVerb.ABORT:
                after = replace(after, route_revision=self._roll_back(execute, after, by))
            _write(execute, after, changed)
            return after

    def _roll_back(self, execute: Execute, rollout: Rollout, by: str) -> int:
        """Returns the route's revision. What another hand has changed since is not taken back a second time."""
        now = self._routes.show_within(execute, rollout.model).last
        base = rollout.begins_at
        if now.revision == base or (now.revision == rollout.route_revision and now.restores == base):
            return now.revision
        return self._routes.roll_back_within(execute, rollout.model, base, by=by).last.revision

    # -- story

    def story(self, id: str, *, since: int = 0) -> list[StoryEntry]:
        """The oldest first, after entry `since`."""
        with self._database.reading() as execute:
            _get(execute, id)
            rows = execute(
                "SELECT number, document FROM rollout_story WHERE rollout = ? AND number > ? ORDER BY number",
                (id, since),
            )
        return [StoryEntry(number, Raw(document.encode())) for number, document in rows]

    # -- blocks

    def write_blocks(self, blocks: Iterable[Block]) -> None:
        """Writes blocks. One that is written twice counts once; one that comes when the rollout is over is dropped."""
        with self._database.writing() as execute:
            for block in sorted(blocks, key=lambda one: one.rollout):  # rows are locked in one order by everybody
                numbers = execute(
                    "UPDATE rollouts SET num_blocks = num_blocks + 1 WHERE id = ? AND is_over = 0 RETURNING num_blocks",
                    (block.rollout,),
                )
                if numbers:
                    execute(
                        "INSERT INTO rollout_blocks (rollout, step, gateway, at, number, document) "
                        "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (rollout, step, gateway, at) DO NOTHING",
                        (
                            block.rollout,
                            block.step,
                            block.gateway,
                            block.at,
                            numbers[0][0],
                            msgspec.json.encode(block).decode(),
                        ),
                    )

    def blocks(self, id: str, since: int = 0, *, limit: int = MAX_BLOCKS) -> tuple[int, list[Block]]:
        """Blocks after number `since` in the order of their commits, `limit` at most, and the number to ask from the
        next time. Unless that is `limit` or more ahead of `since`, there are no others."""
        with self._database.reading() as execute:
            rows = execute(
                "SELECT number, document FROM rollout_blocks WHERE rollout = ? AND number > ? ORDER BY number "
                f"LIMIT {limit:d}",
                (id, since),
            )
        found = []
        for _, document in rows:
            try:
                found.append(_block_decoder.decode(document))
            except (ValueError, TypeError) as error:
                count_error("store reader", error)
        return (rows[-1][0] if rows else since), found

    # -- feedback

    def add_feedback(self, tenant: str, request_id: str, score: float, comment: str = "") -> Feedback:
        """A user's second word on an answer takes the place of the first."""
        if not 0 <= score <= 1:
            raise InvalidValue("a score is 0 (bad) to 1 (good)", param="score")
        if len(comment) > MAX_COMMENT:
            raise InvalidValue(f"a comment has at most {MAX_COMMENT} characters", param="comment")
        if "\0" in comment:
            raise InvalidValue("a comment has no NUL characters", param="comment")
        with self._database.writing() as execute:
            ((number,),) = execute("UPDATE feedback_counter SET value = value + 1 RETURNING value")
            now = self._clock()
            execute("DELETE FROM feedback WHERE at < ?", (now - FEEDBACK_KEPT_S,))
            execute(
                "INSERT INTO feedback (tenant_id, request_id, number, at, score, comment) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (tenant_id, request_id) DO UPDATE SET number = excluded.number, at = excluded.at, "
                "score = excluded.score, comment = excluded.comment",
                (tenant, request_id, number, now, score, comment),
            )
        return Feedback(number, tenant, request_id, score, comment, now)

    def feedback_since(self, number: int, *, limit: int = 10_000) -> list[Feedback]:
        """After `number`, in the order of commits."""
        with self._database.reading() as execute:
            rows = execute(
                "SELECT number, tenant_id, request_id, score, comment, at FROM feedback WHERE number > ? "
                f"ORDER BY number LIMIT {limit:d}",
                (number,),
            )
        return [Feedback(*row) for row in rows]

    def last_feedback(self) -> int:
        """The number of the newest."""
        with self._database.reading() as execute:
            return int(execute("SELECT value FROM feedback_counter")[0][0])

    def _forget_old(self, execute: Execute, model: str) -> None:
        rows = execute(
            "SELECT id FROM rollouts WHERE model = ? AND is_over = 1 "
            f"ORDER BY started_at DESC LIMIT 1000 OFFSET {MAX_KEPT:d}",
            (model,),
        )
        for (id,) in rows:
            execute("DELETE FROM rollout_story WHERE rollout = ?", (id,))
            execute("DELETE FROM rollouts WHERE id = ?", (id,))


def new_rollout(model: str, old: str, new: str, *, by: str = "") -> Rollout:
    """A rollout to be started; its starter gives it a state."""
    id = secrets.token_hex(4)
    return Rollout(id, model, old, new, RolloutOrder(id, model, old, new, step=0), by=by)


def rollouts_changed(execute: Execute, since: int) -> tuple[RolloutOrder, ...] | None:
    """Orders of all rollouts that are on, if one changed after revision `since`. None: none did."""
    if not execute("SELECT 1 FROM rollouts WHERE changed > ? LIMIT 1", (since,)):
        return None
    return _orders(execute)


def _author(rollout: Rollout) -> str:
    return f"rollout {rollout.id}"


def _orders(execute: Execute) -> tuple[RolloutOrder, ...]:
    found = _rollouts(execute("SELECT document, revision FROM rollouts WHERE is_over = 0 ORDER BY id"))
    return tuple(one.order for one in found)


def _get(execute: Execute, id: str) -> Rollout:
    rows = execute("SELECT document, revision FROM rollouts WHERE id = ?", (id,))
    if not rows:
        raise RolloutNotFound(f"there is no rollout '{id}'")
    return _decode(*rows[0])


def _lock(execute: Execute, id: str) -> Rollout:
    """Nobody changes the rollout's row until the commit."""
    execute("UPDATE rollouts SET revision = revision WHERE id = ?", (id,))
    return _get(execute, id)


def _decode(document: str, revision: int) -> Rollout:
    return replace(_rollout_decoder.decode(document), revision=revision)


def _rollouts(rows: Sequence[Sequence[object]]) -> list[Rollout]:
    """Returns the rollouts of rows. One that cannot be read was written by another version, and is left out."""
    found = []
    for document, revision in rows:
        try:
            found.append(_decode(str(document), int(str(revision))))
        except (ValueError, TypeError) as error:
            count_error("store reader", error)
    return found


def _write(execute: Execute, rollout: Rollout, changed: int | None) -> None:
    """`changed`: the store's revision, if gateways must know."""
    execute(
        "UPDATE rollouts SET document = ?, revision = ?, is_over = ?, changed = COALESCE(?, changed) WHERE id = ?",
        (_encode(rollout), rollout.revision, int(rollout.is_over), changed, rollout.id),
    )


def _tell(execute: Execute, id: str, story: Iterable[Struct]) -> None:
    ((last,),) = execute("SELECT COALESCE(MAX(number), 0) FROM rollout_story WHERE rollout = ?", (id,))
    for number, entry in enumerate(story, start=last + 1):
        execute("INSERT INTO rollout_story (rollout, number, document) VALUES (?, ?, ?)", (id, number, _encode(entry)))


def _encode(row: Struct) -> str:
    return msgspec.json.encode(row).decode()
