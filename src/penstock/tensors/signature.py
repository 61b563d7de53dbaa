"""A model's inputs and outputs, and whether a request's tensors are those that it takes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from penstock.core.config import nearest, shown
from penstock.core.errors import InvalidRequest
from penstock.tensors.datatypes import DATATYPES, Array


class TensorSpec(NamedTuple):
    name: str
    datatype: str
    dims: tuple[int, ...]  # without the batch dimension; -1: any size

    def fits(self, dims: tuple[int, ...]) -> bool:
        return dims == self.dims or (
            len(dims) == len(self.dims) and all(want in (-1, has) for want, has in zip(self.dims, dims, strict=True))
        )

    def shape(self, max_batch_size: int) -> list[int]:
        """Shape as metadata have it."""
        return [-1, *self.dims] if max_batch_size else list(self.dims)


class Checked(NamedTuple):
    size: int  # rows of the batch dimension; 1 where there is none
    key: Hashable  # requests with the same can be executed together
    num_bytes: int


class Signature(NamedTuple):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int  # 0: there is no batch dimension

    def check(self, given: Mapping[str, Array]) -> Checked:
        """Raises InvalidRequest, about the first tensor that is wrong, by its name."""
        if len(given) != len(self.inputs):
            self._refuse_unknown(given)
        size, key, num_bytes = 1, [], 0
        for position, spec in enumerate(self.inputs):
            array = given.get(spec.name)
            if array is None:
                self._refuse_unknown(given)
                raise InvalidRequest(f"the input '{spec.name}' is missing", param=spec.name)
            if DATATYPES.get(array.dtype) != spec.datatype:
                said = f"'{spec.name}' is {DATATYPES.get(array.dtype)}; this model takes {spec.datatype}"
                raise InvalidRequest(said, param=spec.name)
            dims = self._check_shape(spec, array.shape)
            if self.max_batch_size:
                rows = array.shape[0]
                if position and rows != size:
                    said = f"'{spec.name}' has {rows} rows, and '{self.inputs[0].name}' has {size}"
                    raise InvalidRequest(said, param=spec.name)
                size = rows
            key.append(dims)
            num_bytes += array.nbytes if spec.datatype != "BYTES" else sum(map(len, array.flat))
        return Checked(size, tuple(key), num_bytes)

    def _refuse_unknown(self, given: Iterable[str]) -> None:
        known = [spec.name for spec in self.inputs]
        for name in given:
            if name not in known:
                hint = nearest(name, known)
                suggestion = f"; did you mean '{hint}'?" if hint else ""
                raise InvalidRequest(f"'{shown(name)}' is no input of this model{suggestion}", param=shown(name))

    def check_outputs(self, names: Iterable[str]) -> None:
        for name in names:
            if all(name != spec.name for spec in self.outputs):
                known = [spec.name for spec in self.outputs]
                raise InvalidRequest(
                    f"'{shown(name)}' is no output of this model: {', '.join(known)} are", param=shown(name)
                )

    def _check_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions without the batch's."""
        if not spec.fits(shape[1:] if self.max_batch_size else shape) or (self.max_batch_size and not shape):
            wanted = spec.shape(self.max_batch_size)
            said = f"'{spec.name}' has the shape {list(shape)}; this model takes {wanted} (-1: any size)"
            raise InvalidRequest(said, param=spec.name)
        if not self.max_batch_size:
            return shape
        if not 1 <= shape[0] <= self.max_batch_size:
            said = f"'{spec.name}' has {shape[0]} rows; this model takes 1 to {self.max_batch_size} in a request"
            raise InvalidRequest(said, param=spec.name)
        return shape[1:]
