"""Compares and copies much memory on several processors: one alone reaches a fraction of what the memory can do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: What one thread takes at a time.
_PIECE_BYTES = 16 * 2**20
#: Less is done at once: starting threads takes a tenth of a millisecond each.
_THREADS_FROM_BYTES = 32 * 2**20
_MAX_THREADS = 8


def differing(pairs: list[tuple[int, int, int]]) -> set[int]:
    """Which of the pairs (address, address, bytes) differ, by their place in the list.

    Large ones are compared in pieces, and no further than to the first difference that any thread finds.
    """
    found: set[int] = set()

    def compare(job: list[tuple[int, int, int, int]]) -> None:
        for index, here, there, nbytes in job:
            if index not in found and _libc.memcmp(here, there, nbytes):
                found.add(index)

    pieces = (
        (index, here + at, there + at, min(_PIECE_BYTES, nbytes - at))
        for index, (here, there, nbytes) in enumerate(pairs)
        for at in range(0, nbytes, _PIECE_BYTES)
    )
    _share_out(compare, pieces, lambda piece: piece[3])
    return found


def write_out(
    fd: int, blocks: list[tuple[int, memoryview]], progress: Callable[[int, int], None] | None = None
) -> None:
    """Write (offset, bytes) into a file; ``progress`` is told now and then how many bytes are written, and of how many.

    Raises:
        OSError: if the file cannot take it.
    """
    total_bytes = sum(len(view) for _, view in blocks)
    written_bytes = 0

    def write(job: list[tuple[int, memoryview]]) -> None:
        for offset, view in job:
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], offset + done)

    def note(job: list[tuple[int, memoryview]]) -> None:
        nonlocal written_bytes
        written_bytes += sum(len(view) for _, view in job)
        if progress is not None:
            progress(written_bytes, total_bytes)

    pieces = (
        (offset + at, view[at : at + _PIECE_BYTES])
        for offset, view in blocks
        for at in range(0, len(view), _PIECE_BYTES)
    )
    _share_out(write, pieces, lambda piece: len(piece[1]), note)


def copy_memory(target: memoryview, source: memoryview) -> None:
    """Copy bytes of the same number; views share their memory with nobody who needs it meanwhile."""
    if len(target) < _THREADS_FROM_BYTES:
        target[:] = source
        return
    to, of = address_of(target), address_of(source)

    def copy(job: list[tuple[int, int]]) -> None:
        for at, nbytes in job:
            ctypes.memmove(to + at, of + at, nbytes)

    pieces = ((at, min(_PIECE_BYTES, len(target) - at)) for at in range(0, len(target), _PIECE_BYTES))
    _share_out(copy, pieces, lambda piece: piece[1])


def _share_out(
    work: Callable[[list[T]], None],
    pieces: Iterable[T],
    size_of: Callable[[T], int],
    note: Callable[[list[T]], None] | None = None,
) -> None:
    """Have the pieces worked on in jobs of about equal size: by this thread, or by several where it is much.

    ``note`` is called in this thread with each job that is done.
    """
    jobs: list[list[T]] = [[]]
    job_bytes = total_bytes = 0
    for piece in pieces:
        if job_bytes >= _PIECE_BYTES:
            jobs.append([])
            job_bytes = 0
        jobs[-1].append(piece)
        job_bytes += size_of(piece)
        total_bytes += size_of(piece)
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(jobs))
    if num_threads < 2 or total_bytes < _THREADS_FROM_BYTES:
        for job in jobs:
            work(job)
            if note is not None:
                note(job)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        # The results are asked for, so that an error of a thread is raised here.
        for job, _ in zip(jobs, pool.map(work, jobs), strict=True):
            if note is not None:
                note(job)


def address_of(buffer: Any) -> int:
    """Where a contiguous buffer lies; 0 for an empty one. ctypes by itself refuses to point at what is read-only."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    try:
        return int(view.buf or 0) if view.len else 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (stable ABI since 3.11)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
