"""What is delivered, and how the rate is taken: the same for everyone, with nothing but numpy."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

#: An element of 64 images of 224 x 224 in colour, a byte each, is so large.
BLOCK_BYTES = 9_600_000
SMALL_BYTES = 1000
BATCH_SIZE = 8
READ_S = 0.01
#: More than anyone takes.
MANY = 10**8
_SIDE, _CROP = 256, 224


@functools.cache
def memory_of(size_bytes: int) -> Any:
    """An array that is made once in each process: an element that costs nothing to make."""
    return np.ones(size_bytes, np.uint8)


def block() -> Any:
    """A new array over the same memory: what a DataLoader has sent once as it is, it never copies again."""
    return memory_of(BLOCK_BYTES)[:]


def small() -> Any:
    """The same, and small."""
    return memory_of(SMALL_BYTES)[:]


def read(index: int) -> Any:
    """An item from slow storage."""
    time.sleep(READ_S)
    return small()


def transform(index: int) -> Any:
    """A sample as an image is made ready for training: crop, mirror, change brightness and contrast, normalise."""
    index = int(index)  # some give a number of numpy, which would make all of this twice as wide
    image = _image()
    at = index % (_SIDE - _CROP)
    sample = image[at : at + _CROP, at : at + _CROP, :].astype(np.float32) / 255
    if index % 2:
        sample = sample[:, ::-1]
    sample = np.clip(sample * (0.8 + 0.4 * (index % 5) / 4), 1e-3, 1) ** (0.8 + 0.1 * (index % 3))
    sample = (sample - sample.mean(axis=(0, 1))) / (sample.std(axis=(0, 1)) + 1e-5)
    return np.ascontiguousarray(sample.transpose(2, 0, 1))


@functools.cache
def _image() -> Any:
    return np.random.default_rng(0).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)


def pace(elements: Iterable[Any], warm_s: float, window_s: float) -> float:
    """Elements a second that an iterator gives, in the window behind the time that it has to warm up.

    Whoever takes does nothing else: what lies ready is gone when the window begins, if it can be had faster than it is
    made.
    """
    iterator = iter(elements)
    next(iterator)
    until = time.perf_counter() + warm_s
    while time.perf_counter() < until:
        next(iterator)
    number = 0
    now = begun = time.perf_counter()
    for _ in iterator:
        number += 1
        now = time.perf_counter()
        if now - begun >= window_s:
            break
    return number / (now - begun)
