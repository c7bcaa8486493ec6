"""Conversations with other machines: in order and whole, whatever the transport loses when it connects anew."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_magic.link.files import File, FileStore, files_of, with_files
from taas_magic.link.peer import Peer
from taas_magic.link.reliable import BrokenStreamError, Frames, ReliableStream, begins, reset
from taas_magic.wire import Interrupt, ResultArrived, Submit, ToRunner
from taas_magic.wire_base import MemoryFile
from taas_magic.wire_data import CancelDelivery


class Wire:
    """Carries frames from one side to the other, and forgets all of them now and then."""

    def __init__(self, seed: int, loss: float) -> None:
        self._random = random.Random(seed)
        self._loss = loss
        self.ways: tuple[deque[Frames], deque[Frames]] = (deque(), deque())

    def break_perhaps(self) -> None:
        if self._random.random() < self._loss:
            for way in self.ways:
                # From somewhere on: what was sent before has arrived.
                for _ in range(self._random.randint(0, len(way))):
                    way.pop()

    def next_from(self, side: int) -> Frames | None:
        way = self.ways[side]
        return way.popleft() if way and self._random.random() < 0.7 else None


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), num_packets=st.integers(0, 60), loss=st.sampled_from([0.0, 0.05, 0.4]))
def test_all_packets_come_once_and_in_order(seed: int, num_packets: int, loss: float) -> None:
    wire, now = Wire(seed, loss), 0.0
    sides = [ReliableStream(now), ReliableStream(now)]
    left = [num_packets, num_packets]
    got: list[list[bytes]] = [[], []]
    for _ in range(3000):
        now += 0.05
        for side, stream in enumerate(sides):
            if left[side]:
                left[side] -= 1
                wire.ways[side].append(stream.send([b"%d" % left[side]], now))
            frames = wire.next_from(1 - side)
            if frames is not None:
                packets, answers = stream.receive(frames, now)
                got[side] += [parts[0] for parts in packets]
                wire.ways[side].extend(answers)
            wire.ways[side].extend(stream.tick(now))
        wire.break_perhaps() if now < 60 else None
        if all(len(each) == num_packets for each in got) and not any(s.unacknowledged_bytes for s in sides):
            break
    expected = [b"%d" % number for number in reversed(range(num_packets))]
    assert got == [expected, expected]
    assert [stream.unacknowledged_bytes for stream in sides] == [0, 0]


def test_whoever_begins_in_the_middle_is_told_so() -> None:
    one = ReliableStream(0.0)
    first, second = one.send([b"a"], 0.0), one.send([b"b"], 0.0)
    assert begins(first)
    assert not begins(second)
    assert not begins([b"x" * 17, b"a"])
    with pytest.raises(BrokenStreamError, match="started anew"):
        one.receive(reset(), 0.0)


@pytest.mark.parametrize("frames", [[], [b""], [b"short"], [b"x" * 18], [b"\xff" * 17]])
def test_what_is_no_packet_breaks_the_conversation(frames: Frames) -> None:
    with pytest.raises(BrokenStreamError):
        ReliableStream(0.0).receive(frames, 0.0)


# ---- messages and files


def file_of(data: bytes) -> File:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return File.of(fd, len(data))


def content(file: File) -> bytes:
    return os.pread(file.fd, file.size_bytes, 0)


@pytest.fixture
def stores() -> Iterator[tuple[FileStore, FileStore]]:
    both = FileStore(3_000_000), FileStore(0)
    yield both
    for each in both:
        each.close()


class Talk:
    """Two peers and what lies between them."""

    def __init__(self, stores: tuple[FileStore, FileStore]) -> None:
        self.ways: tuple[deque[Frames], deque[Frames]] = (deque(), deque())
        self.now = 0.0
        self.here: Peer[ToRunner] = Peer(ToRunner, self.ways[0].append, stores[0], 0.0, forgets=True)
        self.there: Peer[ToRunner] = Peer(ToRunner, self.ways[1].append, stores[1], 0.0, forgets=False)
        self.got: list[tuple[ToRunner, list[File]]] = []
        self.num_bytes = 0

    def go_on(self, rounds: int = 1000) -> None:
        for _ in range(rounds):
            if not any(self.ways):
                return
            self.now += 0.01
            while self.ways[0]:
                frames = self.ways[0].popleft()
                self.num_bytes += sum(map(len, frames))
                self.got += self.there.receive(frames, self.now)
            while self.ways[1]:
                self.here.receive(self.ways[1].popleft(), self.now)


def test_files_come_before_their_message_and_only_once(stores: tuple[FileStore, FileStore]) -> None:
    talk = Talk(stores)
    data = os.urandom(1_500_000)
    file = stores[0].add(file_of(data))
    told: list[tuple[int, int]] = []
    talk.here.send_with_files(CancelDelivery("one"), [file, file], 0.0, lambda *how_far: told.append(how_far))
    talk.go_on()
    ((message, files),) = talk.got
    assert message == CancelDelivery("one")
    assert [content(each) for each in files] == [data, data]
    assert told[-1] == (len(data), len(data))
    before = talk.num_bytes
    talk.here.send_with_files(CancelDelivery("two"), [file], talk.now)
    talk.go_on()
    assert content(talk.got[1][1][0]) == data
    assert talk.num_bytes - before < 200
    # And back: what came from there is known there.
    back = talk.there
    back.send_with_files(CancelDelivery("back"), [talk.got[1][1][0]], talk.now)
    assert sum(len(part) for frames in talk.ways[1] for part in frames) < 300


def test_what_has_no_files_does_not_wait_for_those_that_have(stores: tuple[FileStore, FileStore]) -> None:
    talk = Talk(stores)
    large = stores[0].add(file_of(bytes(20_000_000)))
    talk.here.send_with_files(CancelDelivery("large"), [large], 0.0)
    talk.here.send_with_files(CancelDelivery("behind it"), [], 0.0)
    talk.here.send(Interrupt("run", 1), 0.0)
    assert talk.here.waits_bytes < 6_000_000
    talk.go_on()
    assert [type(message) for message, _ in talk.got] == [Interrupt, CancelDelivery, CancelDelivery]
    assert [message.delivery_id for message, _ in talk.got[1:]] == ["large", "behind it"]  # type: ignore[union-attr]


def test_a_message_can_be_taken_back_while_its_files_are_sent(stores: tuple[FileStore, FileStore]) -> None:
    talk = Talk(stores)
    data = os.urandom(9_000_000)
    large = stores[0].add(file_of(data))
    talk.here.send_with_files(CancelDelivery("large"), [large], 0.0)
    assert talk.here.withdraw(lambda message: getattr(message, "delivery_id", "") == "large")
    assert not talk.here.withdraw(lambda message: True)
    talk.go_on()
    assert not talk.got
    talk.here.send_with_files(CancelDelivery("again"), [large], talk.now)
    talk.go_on()
    assert content(talk.got[0][1][0]) == data


def test_what_is_beyond_the_budget_is_forgotten_on_both_sides(stores: tuple[FileStore, FileStore]) -> None:
    talk = Talk(stores)
    for number in range(5):
        file = stores[0].add(file_of(bytes([number]) * 1_000_000))
        talk.here.send_with_files(CancelDelivery(str(number)), [file], talk.now)
        talk.go_on()
    assert list(stores[0].files) == list(stores[1].files)
    assert len(stores[0].files) == 3


def test_a_file_is_known_by_its_inode(stores: tuple[FileStore, FileStore]) -> None:
    file = stores[0].add(file_of(b"abc"))
    again = os.dup(file.fd)
    assert stores[0].opened(again, 3) is file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again)
    other = os.memfd_create("other")
    assert stores[0].opened(other, 0) is not file


def test_all_memory_files_of_a_message_are_found() -> None:
    one, two, three = (MemoryFile(1, fd, 7) for fd in (3, 4, 5))
    arrived = ResultArrived("run", 1, one)
    assert files_of(arrived) == [one]
    assert with_files(arrived, lambda file: two).parcel == two
    assert files_of(Interrupt("run", 1)) == []
    fields = Submit.__struct_fields__
    assert {"parcel", "segments"} <= set(fields)
    assert files_of(ResultArrived("run", 1)) == []
    assert three.fd == 5


@settings(deadline=None, max_examples=300)
@given(parts=st.lists(st.binary(max_size=40), max_size=4))
def test_what_is_no_message_breaks_the_conversation_and_nothing_else(parts: list[bytes]) -> None:
    store = FileStore(0)
    peer: Peer[ToRunner] = Peer(ToRunner, lambda frames: None, store, 0.0, forgets=False)
    sender = ReliableStream(0.0)
    try:
        found = peer.receive(sender.send(parts, 0.0), 0.0)
    except (BrokenStreamError, MemoryError):
        found = []
    assert found == [] or isinstance(found[0][0], object)
    store.close()
