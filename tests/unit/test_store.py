"""What was sent is kept, found again byte by byte, and given up in order of use."""

from __future__ import annotations

import os

import numpy as np
import pytest

from taas_magic.errors import CannotTravelError
from taas_magic.namespace import bulk
from taas_magic.namespace.blocks import Contents, IncomingBlocks, OutgoingBlocks, Parcel, write_parcel
from taas_magic.namespace.store import MAX_SEGMENTS, BlockStore

KIB, MIB = 2**10, 2**20


def send(store: BlockStore, *arrays: np.ndarray) -> Parcel:
    """A parcel of arrays, one block each."""
    blocks = OutgoingBlocks()
    for array in arrays:
        number = blocks.enter(array.ctypes.data, array.nbytes, array)
        blocks.blocks[number].use(0, array.nbytes)
    parcel = write_parcel(Contents(b"", [], []), blocks, store=store)
    # What comes out at the other end is what went in, wherever it lies.
    incoming = IncomingBlocks(parcel.fds)
    assert [bytes(incoming.view(number)) for number in range(len(arrays))] == [array.tobytes() for array in arrays]
    return parcel


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(100 * MIB)


def random_array(nbytes: int) -> np.ndarray:
    return np.frombuffer(bytearray(os.urandom(nbytes)), np.uint8)


def test_the_same_is_sent_once(store: BlockStore) -> None:
    arrays = [random_array(MIB), random_array(10 * KIB)]
    assert send(store, *arrays).size_bytes > MIB
    again = send(store, *arrays)
    assert again.size_bytes < KIB
    assert again.mapped_bytes > MIB
    assert len(again.fds) == 2


def test_one_byte_makes_a_difference(store: BlockStore) -> None:
    large, other = random_array(40 * MIB), random_array(MIB)
    send(store, large, other)
    large[-1] ^= 1
    again = send(store, large, other)
    assert 40 * MIB <= again.size_bytes < 41 * MIB


def test_the_same_bytes_elsewhere_are_found(store: BlockStore) -> None:
    array = random_array(MIB)
    send(store, array)
    assert send(store, array.copy()).size_bytes < KIB


def test_two_that_are_equal_stay_two(store: BlockStore) -> None:
    zeros = [np.zeros(MIB, np.uint8) for _ in range(3)]
    send(store, zeros[0])
    parcel = send(store, *zeros)
    assert 2 * MIB <= parcel.size_bytes < 3 * MIB
    incoming = IncomingBlocks(parcel.fds)
    assert len({incoming.address(number) for number in range(3)}) == 3


def test_small_ones_are_not_looked_for(store: BlockStore) -> None:
    array = random_array(KIB)
    send(store, array)
    assert not send(store, array).segments


def test_the_budget_holds_and_the_least_recently_used_goes_first(store: BlockStore) -> None:
    store.budget_bytes = 3 * MIB + 100 * KIB
    arrays = [random_array(MIB) for _ in range(3)]
    for array in arrays:
        send(store, array)
    send(store, arrays[0])
    send(store, random_array(MIB))
    assert store.size_bytes <= store.budget_bytes
    assert send(store, arrays[0]).size_bytes < KIB
    assert send(store, arrays[1]).size_bytes > MIB


def test_without_a_budget_nothing_is_kept(store: BlockStore) -> None:
    store.budget_bytes = 0
    array = random_array(MIB)
    send(store, array)
    assert store.size_bytes == 0
    assert send(store, array).size_bytes > MIB


def test_a_file_of_which_most_is_old_is_let_go(store: BlockStore) -> None:
    model, data = random_array(8 * MIB), random_array(MIB)
    send(store, model, data)
    for _ in range(4):
        model += 1
        parcel = send(store, model, data)
    assert parcel.size_bytes < 10 * MIB
    store.shrink(10 * MIB)
    assert send(store, model, data).size_bytes < KIB


def test_a_parcel_refers_to_few_files(store: BlockStore) -> None:
    arrays = [random_array(64 * KIB) for _ in range(MAX_SEGMENTS + 5)]
    for array in arrays:
        send(store, array)
    parcel = send(store, *arrays)
    assert len(parcel.segments) == MAX_SEGMENTS
    assert 5 * 64 * KIB <= parcel.size_bytes < 6 * 64 * KIB


def test_what_is_kept_is_given_up_where_memory_lacks(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    array = random_array(MIB)
    send(store, array)
    monkeypatch.setattr("taas_magic.namespace.store.available_memory_bytes", lambda: MIB)
    monkeypatch.setattr("taas_magic.namespace.blocks.available_memory_bytes", lambda: 3 * MIB - store.size_bytes)
    parcel = send(store, random_array(int(1.5 * MIB)))
    assert parcel.size_bytes > MIB
    with pytest.raises(CannotTravelError, match="are free"):
        send(store, random_array(4 * MIB))


def test_a_file_that_was_sent_cannot_be_changed(store: BlockStore) -> None:
    parcel = send(store, random_array(MIB))
    with pytest.raises(PermissionError):
        os.pwrite(parcel.fd, b"x", 100)
    with pytest.raises(PermissionError):
        os.ftruncate(parcel.fd, 0)


def test_much_is_compared_and_copied_in_parts() -> None:
    size = 70 * MIB + 123
    one, two = random_array(size), None
    two = one.copy()
    pair = (one.ctypes.data, two.ctypes.data, size)
    assert bulk.differing([pair]) == set()
    two[size - 1] ^= 1
    assert bulk.differing([pair, (one.ctypes.data, two.ctypes.data, MIB)]) == {0}
    bulk.copy_memory(two.data, one.data)
    assert bulk.differing([pair]) == set()
    fd = os.memfd_create("test")
    told: list[tuple[int, int]] = []
    bulk.write_out(fd, [(5, one.data), (0, memoryview(b"12345"))], lambda done, total: told.append((done, total)))
    assert os.pread(fd, 5, 0) == b"12345"
    assert os.pread(fd, size, 5) == one.tobytes()
    assert told[-1] == (size + 5, size + 5)
    assert told == sorted(told)
    os.close(fd)


def test_an_error_of_a_thread_is_raised() -> None:
    reader, writer = os.pipe()
    with pytest.raises(OSError, match=r"[Ss]eek"):
        bulk.write_out(writer, [(0, memoryview(bytearray(64 * MIB)))])
    os.close(reader)
    os.close(writer)
