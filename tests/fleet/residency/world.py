"""A device with models on it, as the residency policy sees it, on a clock that tests move: loads take a while, requests
too. Each step checks what must always hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.residency import Residence, Wish
from penstock.fleet.residency.memory_plan import ModelNeeds
from penstock.fleet.residency.policy import Aim, ModelView, Rules, decide

LOAD_S, LEAVE_S = 3.0, 2.0
GIB = 1 << 30
_CHANGING = (Residence.LOADING, Residence.WAKING, Residence.LEAVING, Residence.DRAINING)


def needs(name: str, fixed: int, floor: int = 1, most: int = 100, parked: int = 0) -> ModelNeeds:
    """Returns the needs of a model; arguments are in GiB."""
    return ModelNeeds(name, fixed * GIB, floor * GIB, most * GIB, parked_bytes=parked * GIB)


@dataclass
class Model:
    needs: ModelNeeds
    can_park: bool = False
    state: Residence = Residence.UNLOADED
    since: float = 0.0
    leaves_to: Residence = Residence.UNLOADED
    kv_bytes: int = 0
    loaded_at: float = 0.0
    used_at: float = 0.0
    ends: list[float] = field(default_factory=list)  # of requests in flight
    waiting: list[tuple[float, float]] = field(default_factory=list)  # since when, and how long each takes
    pinned: bool = False
    wish: Wish = Wish.NONE
    num_loads: int = 0
    num_served: int = 0
    was_refused: str = ""
    was_parked: bool = False  # before it left

    @property
    def held_bytes(self) -> int:
        match self.state:
            case Residence.UNLOADED:
                return 0
            case Residence.PARKED:
                return self.needs.parked_bytes
            case Residence.LEAVING if self.was_parked:
                return self.needs.parked_bytes
            case _:
                return self.total_bytes

    @property
    def total_bytes(self) -> int:
        return self.needs.fixed_bytes + self.kv_bytes

    def view(self) -> ModelView:
        is_parked = self.state is Residence.PARKED
        return ModelView(
            self.needs.name,
            self.state,
            self.held_bytes,
            self.loaded_at,
            self.used_at,
            self.leaves_to,
            self.total_bytes if is_parked else 0,
            len(self.ends),
            len(self.waiting),
            self.waiting[0][0] if self.waiting else None,
            self.can_park,
            wish=self.wish,
            pinned=self.pinned,
        )


class World:
    def __init__(self, rules: Rules, *models: ModelNeeds, can_park: bool = False) -> None:
        self.rules = rules
        self.models = {one.name: Model(one, can_park) for one in models}
        self.now = 100.0
        self.aims: dict[str, Aim] = {}
        self.history: list[str] = []  # names, as they were loaded
        self.drains_by_order = False

    def __getitem__(self, name: str) -> Model:
        return self.models[name]

    def state(self, name: str) -> Residence:
        return self[name].state

    def ask(self, name: str, takes_s: float = 1.0) -> None:
        self[name].waiting.append((self.now, takes_s))

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.step()

    def step(self) -> None:
        self.now += 1.0
        for model in self.models.values():
            self._live(model)
        needs = [model.needs for model in self.models.values()]
        self.aims = decide(self.rules, needs, {name: model.view() for name, model in self.models.items()}, self.now)
        for name, aim in self.aims.items():
            self._carry_out(self[name], aim)
        self._serve()
        held = sum(model.held_bytes for model in self.models.values())
        assert held <= self.rules.device_bytes, "more than the device has"
        if self.rules.one_at_a_time:
            states = [model.state for model in self.models.values()]
            coming = [state for state in states if state in (Residence.LOADING, Residence.WAKING)]
            assert not coming or coming == [state for state in states if state in _CHANGING], "others came or went"

    def _live(self, model: Model) -> None:
        """Does what happens by itself."""
        model.ends = [end for end in model.ends if end > self.now]
        if model.ends or model.waiting:
            model.used_at = self.now
        passed_s = self.now - model.since
        match model.state:
            case Residence.LOADING | Residence.WAKING if passed_s >= LOAD_S:
                self._move(model, Residence.LOADED)
                model.loaded_at = self.now
                model.num_loads += 1
                self.history.append(model.needs.name)
                if model.wish in (Wish.LOAD, Wish.WARM_UP):
                    model.wish = Wish.NONE
            case Residence.DRAINING if not model.ends and passed_s >= 1:
                self._move(model, Residence.LEAVING)
            case Residence.LEAVING if passed_s >= LEAVE_S:
                self._move(model, model.leaves_to)
                if model.wish is Wish.PARK:
                    model.wish = Wish.NONE

    def _carry_out(self, model: Model, aim: Aim) -> None:
        model.was_refused = aim.refusal
        if aim.refusal:
            model.waiting.clear()
        match (model.state, aim.to):
            case (Residence.UNLOADED, Residence.LOADED):
                assert aim.kv_bytes >= model.needs.floor_bytes, "less than its floor"
                model.kv_bytes = aim.kv_bytes
                self._move(model, Residence.LOADING)
            case (Residence.PARKED, Residence.LOADED):
                self._move(model, Residence.WAKING)
            case (Residence.PARKED, Residence.UNLOADED):
                model.leaves_to = Residence.UNLOADED
                self._move(model, Residence.LEAVING)
                model.was_parked = True
            case (Residence.LOADED, Residence.PARKED | Residence.UNLOADED):
                if model.wish is Wish.NONE:
                    assert not model.pinned, "it is pinned"
                    assert self.now - model.loaded_at >= self.rules.min_residence_s, "before its time"
                model.leaves_to = aim.to
                self._move(model, Residence.DRAINING)
            case (Residence.DRAINING, Residence.LOADED):
                self._move(model, Residence.LOADED)
            case (Residence.DRAINING, _):
                model.leaves_to = aim.to

    def _move(self, model: Model, state: Residence) -> None:
        if state is Residence.LEAVING:
            assert not model.ends, "in the middle of a stream"
        model.state, model.since, model.was_parked = state, self.now, False

    def _serve(self) -> None:
        for model in self.models.values():
            if model.state is Residence.LOADED:
                model.ends += [self.now + takes_s for _, takes_s in model.waiting]
                model.num_served += len(model.waiting)
                model.waiting.clear()
