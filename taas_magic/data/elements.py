"""Elements as bytes: whatever a loader yields, laid out so that a rank can use tensors and arrays where they lie.

::

    header       number of buffers, number of those that pickle asks for itself, bytes of the stream
    table        where each buffer begins and how long it is; then the numbers of those that pickle asks for
    stream       a pickle, in which tensors and arrays are references to buffers
    buffers      aligned to cache lines

A class or function of the notebook is its number in what ranks and producers have in common, so that what arrives is
of the very class that the cell knows.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from taas_magic.data.extents import LINE_BYTES
from taas_magic.namespace.blocks import reach_of, span_of_tensor
from taas_magic.namespace.bulk import address_of
from taas_magic.namespace.pickler import reduce_exception

_HEADER = struct.Struct("<IIQ")
_ENTRY = struct.Struct("<QQ")
_NUMBER = struct.Struct("<I")
#: A view that reaches so many times its own size is copied before.
_SPARSE = 2


@dataclass(slots=True)
class Encoded:
    """An element, ready to be written: the head, and (offset, address, bytes) of the buffers."""

    head: bytes
    buffers: list[tuple[int, int, int]]
    size_bytes: int
    #: Keeps the buffers alive.
    owners: list[Any]

    def write(self, address: int) -> None:
        """Write it to memory of this process."""
        ctypes.memmove(address, self.head, len(self.head))
        for offset, source, nbytes in self.buffers:
            ctypes.memmove(address + offset, source, nbytes)

    def to_bytes(self) -> bytes:
        """The whole of it."""
        target = bytearray(self.size_bytes)
        self.write(address_of(target))
        return bytes(target)


class Encoder:
    """Turns elements into bytes; one is used for many.

    Args:
        shared: Numbers of classes and functions by their ``id`` here.
    """

    def __init__(self, shared: Mapping[int, int]) -> None:
        self._stream = io.BytesIO()
        self._pickler = _ElementPickler(self._stream, shared)

    def encode(self, element: Any) -> Encoded:
        """Lay an element out.

        Raises:
            Exception: whatever keeps it from being pickled.
        """
        pickler, stream = self._pickler, self._stream
        stream.seek(0)
        stream.truncate()
        pickler.begin()
        try:
            pickler.dump(element)
            return _lay_out(stream.getbuffer(), pickler.buffers, pickler.asked_for)
        finally:
            pickler.begin()


def _lay_out(stream: memoryview, buffers: list[tuple[int, int, Any]], asked_for: list[int]) -> Encoded:
    head_size = _HEADER.size + len(buffers) * _ENTRY.size + len(asked_for) * _NUMBER.size + len(stream)
    at = head_size
    table, placed, owners = [], [], []
    for address, nbytes, owner in buffers:
        at = -(-at // LINE_BYTES) * LINE_BYTES
        table.append(_ENTRY.pack(at, nbytes))
        placed.append((at, address, nbytes))
        owners.append(owner)
        at += nbytes
    numbers = [_NUMBER.pack(number) for number in asked_for]
    head = b"".join([_HEADER.pack(len(buffers), len(asked_for), len(stream)), *table, *numbers, stream])
    return Encoded(head, placed, at, owners)


class _ElementPickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, stream: io.BytesIO, shared: Mapping[int, int]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._take_buffer)
        import numpy as np
        import torch

        self._torch, self._tensor, self._array = torch, torch.Tensor, np.ndarray
        self._shared = shared
        self.begin()

    def begin(self) -> None:
        """Forget the element before."""
        self.clear_memo()
        self.buffers: list[tuple[int, int, Any]] = []
        self.asked_for: list[int] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is self._tensor:
            return self._reduce_tensor(obj)
        if kind is self._array:
            return self._reduce_array(obj)
        if isinstance(obj, (type, types.FunctionType)):
            number = self._shared.get(id(obj))
            if number is not None:
                return shared_object, (number,)
        if isinstance(obj, BaseException):
            reduced = reduce_exception(obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        self.asked_for.append(self._enter(address_of(raw) if raw.nbytes else 0, raw.nbytes, raw))
        return False

    def _enter(self, address: int, nbytes: int, owner: Any) -> int:
        self.buffers.append((address, nbytes, owner))
        return len(self.buffers) - 1

    def _reduce_tensor(self, tensor: Any) -> Any:
        torch = self._torch
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
        if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__:
            return NotImplemented
        size, stride = tuple(tensor.shape), tensor.stride()
        nbytes = span_of_tensor(size, stride) * tensor.itemsize
        if nbytes > _SPARSE * tensor.numel() * tensor.itemsize:
            tensor = tensor.contiguous()
            stride, nbytes = tensor.stride(), tensor.numel() * tensor.itemsize
        number = self._enter(tensor.data_ptr(), nbytes, tensor)
        return received_tensor, (number, tensor.dtype, size, None if tensor.is_contiguous() else stride)

    def _reduce_array(self, array: Any) -> Any:
        if array.dtype.hasobject:
            return NotImplemented
        low, high = reach_of(array.shape, array.strides, array.itemsize)
        if low or high > _SPARSE * array.nbytes:
            array = array.copy()
            low, high = reach_of(array.shape, array.strides, array.itemsize)
        number = self._enter(array.ctypes.data if array.size else 0, high if array.size else 0, array)
        dtype = array.dtype.str if array.dtype.isbuiltin == 1 and not array.dtype.metadata else array.dtype
        return received_array, (number, dtype, array.shape, None if array.flags.c_contiguous else array.strides)


# -- the other side --------------------------------------------------------------------------------------------------


class _Reading(threading.local):
    base: Any = None
    table: tuple[tuple[int, int], ...] = ()
    objects: Mapping[int, Any] = {}


_reading = _Reading()


def decode(base: Any, objects: Mapping[int, Any]) -> Any:
    """The element that lies in ``base``, an array of bytes; its tensors and arrays keep ``base`` alive.

    Args:
        base: A one-dimensional numpy array of ``uint8``.
        objects: Classes and functions by their numbers.

    Raises:
        Exception: whatever keeps it from being loaded.
    """
    num_buffers, num_asked_for, stream_size = _HEADER.unpack_from(base, 0)
    at = _HEADER.size
    table = tuple(_ENTRY.unpack_from(base, at + index * _ENTRY.size) for index in range(num_buffers))
    at += num_buffers * _ENTRY.size
    numbers = [_NUMBER.unpack_from(base, at + index * _NUMBER.size)[0] for index in range(num_asked_for)]
    at += num_asked_for * _NUMBER.size
    view = memoryview(base)
    buffers = [view[table[number][0] : table[number][0] + table[number][1]] for number in numbers]
    before = _reading.base, _reading.table, _reading.objects
    _reading.base, _reading.table, _reading.objects = base, table, objects
    try:
        return pickle.loads(view[at : at + stream_size], buffers=buffers)
    finally:
        _reading.base, _reading.table, _reading.objects = before


def shared_object(number: int) -> Any:
    """A class or function that this process knows by its number."""
    return _reading.objects[number]


def received_tensor(number: int, dtype: Any, size: tuple[int, ...], stride: tuple[int, ...] | None) -> Any:
    """A tensor over a buffer."""
    import torch

    offset, nbytes = _reading.table[number]
    if not nbytes:
        return torch.empty(size, dtype=dtype)
    flat = torch.frombuffer(_reading.base, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
    return flat.view(size) if stride is None else flat.as_strided(size, stride)


def received_array(number: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
    """An array over a buffer."""
    import numpy as np

    offset, nbytes = _reading.table[number]
    if not nbytes:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, buffer=_reading.base, offset=offset, strides=strides)
