"""The watch over a replica's GPU: the sources there are, read by a thread, told to the server on its event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from penstock.core.settings import ServerSettings
from penstock.engine.messages import EngineInfo
from penstock.observe.gpu.dcgm import DcgmSource, fetch
from penstock.observe.gpu.nvml import open_nvml
from penstock.observe.gpu.sampling import Sampling, Take
from penstock.observe.gpu.source import DeviceSource, Joined


def watch_devices(info: EngineInfo, settings: ServerSettings, take: Take) -> Sampling | None:
    """Tells `take` from now on, on this event loop, how the engine's GPUs are; None: there is nothing to look at."""
    if not info.device.startswith("cuda"):
        return None
    uuids = list(dict.fromkeys(uuid for uuid in (info.device_uuid, *info.other_gpus) if uuid))
    sources: list[DeviceSource] = []
    if (nvml := open_nvml(uuids)) is not None:
        sources.append(nvml)
    if settings.dcgm_url is not None:
        sources.append(DcgmSource(partial(fetch, settings.dcgm_url), uuids))
    if not sources:
        return None
    loop = asyncio.get_running_loop()
    sampling = Sampling(Joined(sources), lambda readings: loop.call_soon_threadsafe(take, readings))
    sampling.start()
    return sampling
