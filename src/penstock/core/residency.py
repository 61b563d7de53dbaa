"""Models that come to a device and leave it: the states they are in, and what an operator may order of them."""

from __future__ import annotations

from enum import StrEnum


class Residence(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"  # takes no new requests; its streams go on
    LEAVING = "leaving"  # parks, or ends
    PARKED = "parked"
    WAKING = "waking"


class Wish(StrEnum):
    """An operator's order for one model. A load, a warm-up and a park are over once they are done."""

    NONE = ""  # as the requests need it
    LOAD = "load"
    UNLOAD = "unload"  # and is not loaded again before another order
    PARK = "park"
    WARM_UP = "warm-up"  # loaded, and a token computed
