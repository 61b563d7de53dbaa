"""The CUDA driver's virtual memory management, by ctypes: addresses and physical memory apart from each other.

Physical memory is created so that it can be exported to another process by a file descriptor, and imported there. The
few declarations are those of cuda.h, whose layout the driver keeps from release to release.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, EngineUnavailable

_GIB = 1 << 30
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _POSIX_FD, _READ, _READ_WRITE = 1, 1, 1, 1, 3


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, with its allocFlags at the end."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaDriver:
    """The driver, for one device whose context is current in the calling thread, as torch makes it."""

    def __init__(self, device: torch.device, library: str = "libcuda.so.1") -> None:
        """Raises `ConfigError` where the driver knows nothing of it."""
        torch.zeros(1, device=device)  # its context exists
        self._device = device
        self._number = device.index if device.index is not None else torch.cuda.current_device()
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as error:
            message = f"parkable and kv_port need virtual memory management, which this driver has not: {error}"
            raise ConfigError(message, param="parkable") from None
        location = _Location(_ON_DEVICE, self._number)
        self._properties = _Properties(type=_PINNED, handle_types=_POSIX_FD, location=location)
        self._location = location
        found = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(found), byref(self._properties), 0)
        self.granularity = found.value

    def reserve(self, num_bytes: int) -> int:
        """Addresses of this process, for good; there is nothing behind them."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def create(self, num_bytes: int) -> int:
        """Physical memory, by its handle. Raises `EngineUnavailable` where there is none."""
        handle = c_uint64()
        error = self._library.cuMemCreate(byref(handle), num_bytes, byref(self._properties), 0)
        if error == _OUT_OF_MEMORY:
            free_gib = self.free_bytes() / _GIB
            raise EngineUnavailable(
                f"the device has {free_gib:.1f} GiB of free memory, and {num_bytes / _GIB:.1f} GiB more are needed"
            )
        self._check(error, "cuMemCreate")
        return handle.value

    def free(self, address: int, num_bytes: int) -> None:
        """Addresses that were reserved and have nothing behind them any more."""
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int, *, is_writable: bool = True) -> None:
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        access = _Access(self._location, _READ_WRITE if is_writable else _READ)
        self._call("cuMemSetAccess", address, num_bytes, byref(access), 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """A file descriptor by which another process can map the same physical memory; whoever asks closes it."""
        descriptor = c_int()
        self._call("cuMemExportToShareableHandle", byref(descriptor), handle, _POSIX_FD, 0)
        return descriptor.value

    def import_memory(self, descriptor: int) -> int:
        """Physical memory that another process has exported, by its handle; the descriptor is not kept."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _POSIX_FD)
        return handle.value

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """Bytes at addresses, which torch takes for the device's own, also where another GPU's memory is behind them
        (asked for their device, the driver would name that one, and torch would copy them). It may outlive their
        mapping, but not be used without one."""
        found = torch.empty(0, dtype=torch.uint8, device=self._device)
        storage = torch._C._construct_storage_from_data_pointer(address, found.device, num_bytes)
        return found.set_(storage, 0, (num_bytes,), (1,))

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: object) -> None:
        self._check(getattr(self._library, name)(*arguments), name)

    def _check(self, error: int, name: str) -> None:
        if error:
            text = c_char_p()
            self._library.cuGetErrorString(error, byref(text))
            said = text.value.decode() if text.value else ""
            raise RuntimeError(f"{name} failed with error {error}: {said}")
