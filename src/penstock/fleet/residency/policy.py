"""Policy of which models are loaded: from their status to each one's target, round by round. Pure: time is an argument.

A model is wanted when requests wait for it, or an operator asked for it, or it is pinned, or it was loaded and its
engine ended by itself. One that is wanted and not loaded is loaded when its fixed memory and its floor are free. Where
they are not, loaded models leave: parked ones first, then idle ones and then busy ones, those that were used longest
ago before others. Never one that is pinned; never before it has been loaded for the minimum residence, so that models
which need the device for themselves take turns instead of chasing each other out; and never in the middle of a stream,
since a model that leaves takes no new requests and goes when its streams have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from penstock.core.residency import Residence, Wish
from penstock.fleet.residency.memory_plan import ModelNeeds, kv_bytes_at_start, refusal

_MOVING = (Residence.DRAINING, Residence.LEAVING)


class ModelView(Struct, frozen=True):
    """One model as it is. Times are the policy's clock."""

    name: str
    state: Residence = Residence.UNLOADED
    held_bytes: int = 0  # of the device, in this state
    loaded_at: float = 0.0  # if it is loaded, or drains
    used_at: float = 0.0  # the last time that a request was at it, or waited for it
    leaves_to: Residence = Residence.UNLOADED  # if it drains or leaves: PARKED or UNLOADED
    woken_bytes: int = 0  # if it is parked: what it holds once it is awake
    in_flight: int = 0
    waiting: int = 0  # requests that are held for it
    waiting_since: float | None = None  # the oldest of them, or the order
    can_park: bool = False
    not_before: float = 0.0  # a load that failed is not tried again before
    wish: Wish = Wish.NONE
    pinned: bool = False
    is_lost: bool = False  # its engine ended by itself, while it was loaded


@dataclass(frozen=True)
class Rules:
    device_bytes: int
    min_residence_s: float = 30.0
    load_on_use: bool = True
    idle_s: float | None = None  # a model without requests for so long leaves; None: only when memory is short
    parks: bool = True  # a model that leaves is parked rather than unloaded, where that frees enough
    one_at_a_time: bool = False  # while a model comes, no other comes or goes: its engine measures what is free


class Aim(NamedTuple):
    """The aim for a model: what it is to be from now on."""

    to: Residence  # LOADED, PARKED or UNLOADED
    reason: str = ""
    kv_bytes: int = 0  # of one that is started now
    wait_s: float | None = None  # of one that is wanted: until its load may begin; None: it waits for nothing
    refusal: str = ""  # why its requests are refused, in words; empty: they are not


def decide(rules: Rules, models: Sequence[ModelNeeds], views: Mapping[str, ModelView], now: float) -> dict[str, Aim]:
    return _Round(rules, models, views, now).aims()


class _Round:
    """One call of `decide`."""

    def __init__(self, rules: Rules, models: Sequence[ModelNeeds], views: Mapping[str, ModelView], now: float) -> None:
        self.rules, self.views, self.now = rules, views, now
        self.needs = {model.name: model for model in models}
        self.found: dict[str, Aim] = {}
        self.free_bytes = rules.device_bytes - sum(view.held_bytes for view in views.values())

    def aims(self) -> dict[str, Aim]:
        self._keep_and_order()
        for view in self._wanted():
            self._make_room(view)
        for view in self.views.values():
            if view.name not in self.found:
                self.found[view.name] = self._rest(view)
        found = {name: self.found[name] for name in self.views}
        return self._one_at_a_time(found) if self.rules.one_at_a_time else found

    def _one_at_a_time(self, found: Mapping[str, Aim]) -> dict[str, Aim]:
        """The decisions without those that wait until another model has come or gone."""
        states = [view.state for view in self.views.values()]
        is_coming = Residence.LOADING in states or Residence.WAKING in states
        moves = is_coming or any(state in _MOVING for state in states)
        aims = {}
        for name, aim in found.items():
            view = self.views[name]
            if aim.to is _resting(view):
                aims[name] = aim
            elif aim.to is Residence.LOADED and view.state in (Residence.UNLOADED, Residence.PARKED):
                aims[name] = Aim(_resting(view), "another model comes or goes", wait_s=0.0) if moves else aim
                is_coming = moves = True
            elif is_coming and view.state not in _MOVING:
                aims[name] = aim._replace(to=_resting(view), reason="another model is being loaded")
            else:
                aims[name] = aim
                moves = True
        return aims

    def _keep_and_order(self) -> None:
        """Aims that no other model has a say in."""
        for view in self.views.values():
            if view.wish is Wish.UNLOAD:
                why = f"{view.name} was unloaded by an operator, and is not loaded before `penstock models load`"
                self.found[view.name] = Aim(Residence.UNLOADED, "it was ordered", refusal=why)
            elif view.state in (Residence.LOADING, Residence.WAKING):
                self.found[view.name] = Aim(Residence.LOADED)
            elif view.wish is Wish.PARK and not view.pinned and view.state is not Residence.UNLOADED:
                to = Residence.PARKED if view.can_park or view.state is Residence.PARKED else Residence.UNLOADED
                self.found[view.name] = Aim(to, "it was ordered")

    def _wanted(self) -> list[ModelView]:
        """Models to be loaded: pinned ones first, then as they were asked for."""
        found = [view for view in self.views.values() if view.name not in self.found and self._is_wanted(view)]
        away = [view for view in found if view.state is not Residence.LOADED]
        for view in found:
            if view.state is Residence.LOADED and view.pinned:
                self.found[view.name] = Aim(Residence.LOADED, "it is pinned")
        return sorted(away, key=lambda view: (not view.pinned, self._asked_at(view)))

    def _asked_at(self, view: ModelView) -> float:
        return self.now if view.waiting_since is None else view.waiting_since

    def _is_wanted(self, view: ModelView) -> bool:
        is_asked_for = view.pinned or view.is_lost or view.wish in (Wish.LOAD, Wish.WARM_UP)
        return is_asked_for or (view.waiting > 0 and (self.rules.load_on_use or view.state is Residence.DRAINING))

    # -- room

    def _make_room(self, view: ModelView) -> None:
        """Loads a model, or takes from others what it lacks."""
        needs, rules, now = self.needs[view.name], self.rules, self.now
        staying = self._staying(view)
        if why := refusal(rules.device_bytes, needs, staying):
            self.found[view.name] = Aim(_resting(view), "it does not fit", refusal=why)
            return
        if view.state is Residence.LEAVING or view.not_before > now:
            wait_s = max(0.0, view.not_before - now)
            self.found[view.name] = Aim(_resting(view), "its last load failed" if wait_s else "", wait_s=wait_s)
            return
        wanted_bytes = view.woken_bytes if view.state is Residence.PARKED else needs.least_bytes
        if wanted_bytes > rules.device_bytes - sum(staying.values()):  # it was parked with a loan that is gone
            self.found[view.name] = Aim(Residence.UNLOADED, "it comes again with a smaller KV cache", wait_s=0.0)
            return
        lacking_bytes = wanted_bytes - view.held_bytes - self.free_bytes
        if view.state is Residence.DRAINING and lacking_bytes <= 0 and self._nobody_needs(view):
            self.found[view.name] = Aim(Residence.LOADED, "requests came while it drained")
            return
        if lacking_bytes <= 0 and view.state is not Residence.DRAINING:
            self._load(view, needs)
            return
        if view.state is Residence.DRAINING:  # it comes again when its memory has been used by who needed it
            return
        wait_s = self._take(view, lacking_bytes)
        # What is free, and what leaves, is kept for it: a smaller model that came later does not take it.
        self.free_bytes -= wanted_bytes - view.held_bytes
        self.found[view.name] = Aim(_resting(view), "it waits for memory", wait_s=wait_s)

    def _staying(self, but: ModelView) -> dict[str, int]:
        """Bytes of other models that stay. Of pinned ones that do not fit together, those that were loaded first do."""
        others = (one for one in self.views.values() if one.pinned and one.name != but.name)
        staying = (one for one in others if one.held_bytes or not but.pinned)
        return {one.name: max(one.held_bytes, self.needs[one.name].least_bytes) for one in staying}

    def _nobody_needs(self, view: ModelView) -> bool:
        """Whether a model that drains could stay: all others that are wanted have been seen to."""
        return all(one.name in self.found for one in self.views.values() if one.name != view.name and self._waits(one))

    def _waits(self, view: ModelView) -> bool:
        return self._is_wanted(view) and view.state in (Residence.UNLOADED, Residence.PARKED)

    def _load(self, view: ModelView, needs: ModelNeeds) -> None:
        if view.state is Residence.PARKED:
            self.free_bytes -= view.woken_bytes - view.held_bytes
            self.found[view.name] = Aim(Residence.LOADED, self._why(view))
            return
        pinned = [self.needs[one.name] for one in self.views.values() if one.pinned and one.name != view.name]
        others = [self.needs[one.name] for one in self.views.values() if not one.pinned and one.name != view.name]
        taken_bytes = self.rules.device_bytes - self.free_bytes
        kv_bytes = kv_bytes_at_start(self.rules.device_bytes, taken_bytes, needs, pinned, others)
        self.free_bytes -= needs.fixed_bytes + kv_bytes
        self.found[view.name] = Aim(Residence.LOADED, self._why(view), kv_bytes=kv_bytes)

    def _why(self, view: ModelView) -> str:
        if view.wish in (Wish.LOAD, Wish.WARM_UP):
            return "it was ordered"
        if view.is_lost:
            return "its engine had ended"
        return "it is pinned" if view.pinned else "a request waits for it"

    def _take(self, wanted: ModelView, lacking_bytes: int) -> float:
        """Lets others leave until so many bytes are free; returns the seconds until the first of them may go, of those
        that it takes. Where what may leave now is not enough, nobody leaves."""
        lacking_bytes -= sum(self._frees(view) for view in self.views.values() if self._goes(view))
        if lacking_bytes <= 0:
            self._go_on(wanted)
            return 0.0
        chosen: list[tuple[ModelView, Residence]] = []
        for view in self._victims(wanted, now_only=True):
            if lacking_bytes <= 0:
                break
            to = self._place(view, lacking_bytes)
            chosen.append((view, to))
            lacking_bytes -= self._frees_as(view, to)
        if lacking_bytes <= 0:
            self._go_on(wanted)
            for view, to in chosen:
                self.found[view.name] = Aim(to, f"{wanted.name} needs its memory")
            return 0.0
        waits_s = []
        for view in self._victims(wanted, now_only=False):  # in the order in which they may leave
            waits_s.append(self._residence_left_s(view))
            lacking_bytes -= view.held_bytes
            if lacking_bytes <= 0:
                break
        return max(waits_s, default=0.0)

    def _go_on(self, wanted: ModelView) -> None:
        """Models that drain already go on to leave: somebody needs what they have."""
        for view in self.views.values():
            if view.state is Residence.DRAINING and view.name not in self.found:
                self.found[view.name] = Aim(view.leaves_to, f"{wanted.name} needs its memory")

    def _goes(self, view: ModelView) -> bool:
        """Whether its memory will be free, by what was decided before."""
        aim = self.found.get(view.name)
        return view.state in (Residence.DRAINING, Residence.LEAVING) or (
            aim is not None and aim.to is not Residence.LOADED and view.state is Residence.LOADED
        )

    def _frees(self, view: ModelView) -> int:
        aim = self.found.get(view.name)
        if aim is None or view.state is Residence.LEAVING:
            return self._frees_as(view, view.leaves_to)
        return self._frees_as(view, aim.to)

    def _frees_as(self, view: ModelView, to: Residence) -> int:
        return view.held_bytes - (self.needs[view.name].parked_bytes if to is Residence.PARKED else 0)

    def _place(self, view: ModelView, lacking_bytes: int) -> Residence:
        if view.state is Residence.PARKED or not (view.can_park and self.rules.parks):
            return Residence.UNLOADED
        return Residence.PARKED if self._frees_as(view, Residence.PARKED) >= lacking_bytes else Residence.UNLOADED

    def _victims(self, wanted: ModelView, *, now_only: bool) -> Iterable[ModelView]:
        """Models that may leave for another, the first to leave first. One that was loaded for requests which waited
        longer serves these before."""
        found = [
            view
            for view in self.views.values()
            if view.state in (Residence.PARKED, Residence.LOADED)
            and view.held_bytes > 0
            and view.name not in self.found
            and not view.pinned
            and not (view.state is Residence.LOADED and view.waiting and self._asked_at(view) <= self._asked_at(wanted))
            and not (now_only and self._residence_left_s(view) > 0)
        ]
        if not now_only:
            return sorted(found, key=self._residence_left_s)
        return sorted(found, key=self._rank)

    def _rank(self, view: ModelView) -> tuple[bool, bool, float]:
        is_busy = view.in_flight > 0
        return view.state is Residence.LOADED, is_busy, view.loaded_at if is_busy else view.used_at

    def _residence_left_s(self, view: ModelView) -> float:
        if view.state is not Residence.LOADED:
            return 0.0
        return max(0.0, view.loaded_at + self.rules.min_residence_s - self.now)

    # -- the others

    def _rest(self, view: ModelView) -> Aim:
        """A model that nobody has decided about."""
        rules = self.rules
        if view.state is Residence.DRAINING:
            return Aim(Residence.LOADED, "nobody needs its memory any more")
        if view.state is Residence.LOADED and rules.idle_s is not None and not view.in_flight and not view.waiting:
            idle_s = self.now - max(view.used_at, view.loaded_at)
            if idle_s >= max(rules.idle_s, rules.min_residence_s):
                to = Residence.PARKED if view.can_park and rules.parks else Residence.UNLOADED
                return Aim(to, f"nobody has used it for {idle_s:.0f} s")
        if view.state is Residence.LOADED and self._is_wanted(view):
            return Aim(Residence.LOADED, self._why(view))
        return Aim(_resting(view), refusal=self._refusal(view))

    def _refusal(self, view: ModelView) -> str:
        """Returns why requests for a model that is not loaded are refused; empty: they are not."""
        if view.state not in (Residence.UNLOADED, Residence.PARKED, Residence.LEAVING):
            return ""
        if not self.rules.load_on_use:
            return f"{view.name} is not loaded, and models are not loaded by use here (load_on_use)"
        return refusal(self.rules.device_bytes, self.needs[view.name], self._staying(view))


def _resting(view: ModelView) -> Residence:
    """Returns what a model stays that nothing is done to."""
    match view.state:
        case Residence.PARKED:
            return Residence.PARKED
        case Residence.UNLOADED | Residence.LEAVING:
            return Residence.UNLOADED
        case _:
            return Residence.LOADED
