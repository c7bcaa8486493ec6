"""Messages and descriptors over a socket pair, between processes that mean well and some that do not."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_magic.channel import MAX_FRAME_BYTES, Channel, ChannelClosedError
from taas_magic.wire import CellFinished, Exit, FromRank, InputLine, RankDisplay, RankHome, RankInput, ToRank

Ends = tuple[Channel[FromRank], Channel[ToRank]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The runner's end of a rank's channel, and the rank's."""
    before = open_descriptors()
    ours, theirs = Channel.pair()
    runner: Channel[FromRank] = Channel(ours, FromRank)
    rank: Channel[ToRank] = Channel(theirs, ToRank)
    yield runner, rank
    runner.close()
    rank.close()
    assert open_descriptors() == before


@contextlib.contextmanager
def raw() -> Iterator[tuple[socket.socket, Channel[FromRank]]]:
    """A socket to write anything into, and the runner's end."""
    ours, theirs = Channel.pair()
    channel: Channel[FromRank] = Channel(ours, FromRank)
    try:
        yield theirs, channel
    finally:
        theirs.close()
        channel.close()


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def frame(payload: bytes, num_descriptors: int = 0, *, size: int | None = None) -> bytes:
    return struct.pack("<IH", len(payload) if size is None else size, num_descriptors) + payload


def available(channel: Channel[FromRank]) -> list[object]:
    return [message for message, _ in channel.receive_available()]


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def test_messages_go_both_ways(ends: Ends) -> None:
    runner, rank = ends
    runner.send(InputLine("yes"))
    rank.send(RankInput("sure?"))
    assert rank.receive() == (InputLine("yes"), [])
    assert runner.receive() == (RankInput("sure?"), [])


def test_many_messages_at_once_keep_their_order(ends: Ends) -> None:
    runner, rank = ends
    sent = [RankDisplay("display", b"%d" % number) for number in range(100)]
    for message in sent:
        rank.send(message)
    assert available(runner) == sent
    assert available(runner) == []


def test_a_message_in_pieces() -> None:
    with raw() as (sock, channel):
        data = frame(msgspec.msgpack.encode(RankInput("name?"))) * 2
        for at in range(0, len(data), 5):
            sock.sendall(data[at : at + 5])
            arrived = at + 5 >= len(data)
            messages = available(channel)
            if arrived:
                assert messages[-1] == RankInput("name?")


@settings(deadline=None)
@given(st.lists(st.text(max_size=40), max_size=12), st.data())
def test_however_the_stream_is_cut_the_messages_are_the_same(prompts: list[str], data: st.DataObject) -> None:
    stream = b"".join(frame(msgspec.msgpack.encode(RankInput(prompt))) for prompt in prompts)
    with raw() as (sock, channel):
        received: list[object] = []
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            sock.sendall(stream[:size])
            stream = stream[size:]
            received += available(channel)
        assert received == [RankInput(prompt) for prompt in prompts]


def test_a_large_message_while_nobody_reads_yet(ends: Ends) -> None:
    runner, rank = ends
    content = os.urandom(5 * 2**20)
    sender = threading.Thread(target=rank.send, args=(RankDisplay("display", content),))
    sender.start()
    message, _ = runner.receive()
    sender.join(60)
    assert isinstance(message, RankDisplay)
    assert message.content == content


def test_several_threads_send_whole_messages(ends: Ends) -> None:
    runner, rank = ends
    texts = [letter * 200_000 for letter in "abcd"]
    senders = [threading.Thread(target=rank.send, args=(RankInput(text),)) for text in texts]
    for sender in senders:
        sender.start()
    received = [runner.receive()[0] for _ in senders]
    for sender in senders:
        sender.join(60)
    assert sorted(message.prompt for message in received if isinstance(message, RankInput)) == texts


def test_a_loud_sender_does_not_hold_the_reader_up(ends: Ends) -> None:
    """What is read at once is bounded, so the others get their turn; the rest stays readable."""
    runner, rank = ends
    content = b"x" * 2**20
    num_messages = 40

    def talk() -> None:
        for _ in range(num_messages):
            rank.send(RankDisplay("display", content))

    sender = threading.Thread(target=talk)
    sender.start()
    counts: list[int] = []
    while sum(counts) < num_messages:
        counts.append(len(available(runner)))
    sender.join(60)
    assert sum(counts) == num_messages
    assert max(counts) <= 18


# -- descriptors -----------------------------------------------------------------------------------------------------


def test_descriptors_arrive_with_their_message(ends: Ends) -> None:
    runner, rank = ends
    reader, writer = os.pipe()
    memory = os.memfd_create("test")
    rank.send(RankInput("before"))
    rank.send(RankHome(7), (memory, writer))
    rank.send(RankInput("after"))
    received = list(runner.receive_available())
    assert [message for message, _ in received] == [RankInput("before"), RankHome(7), RankInput("after")]
    (_, none), (_, fds), (_, none_either) = received
    assert not none
    assert not none_either
    assert [identity(fd) for fd in fds] == [identity(memory), identity(writer)]
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in (reader, writer, memory, *fds):
        os.close(fd)


def test_descriptors_of_several_messages_are_not_mixed_up(ends: Ends) -> None:
    runner, rank = ends
    files = [os.memfd_create(f"test-{number}") for number in range(6)]
    rank.send(RankHome(1), files[:1])
    rank.send(RankHome(3), files[1:4])
    rank.send(RankHome(2), files[4:])
    received = [fds for _, fds in runner.receive_available()]
    assert [[identity(fd) for fd in fds] for fds in received] == [
        [identity(fd) for fd in files[:1]],
        [identity(fd) for fd in files[1:4]],
        [identity(fd) for fd in files[4:]],
    ]
    for fd in (*files, *(fd for fds in received for fd in fds)):
        os.close(fd)


def test_a_large_message_with_a_descriptor(ends: Ends) -> None:
    runner, rank = ends
    memory = os.memfd_create("test")
    sent = RankHome(1, [("x" * 2**20, "no")])
    sender = threading.Thread(target=rank.send, args=(sent, (memory,)))
    sender.start()
    message, (fd,) = runner.receive()
    sender.join(60)
    assert message == sent
    assert identity(fd) == identity(memory)
    os.close(fd)
    os.close(memory)


def test_descriptors_that_nobody_took_are_closed_with_the_channel() -> None:
    before = open_descriptors()
    with raw() as (sock, channel):
        memory = os.memfd_create("test")
        socket.send_fds(sock, [frame(b"half", 1, size=1000)], [memory])
        os.close(memory)
        assert available(channel) == []
        assert open_descriptors() == before + 3, "two sockets, and the descriptor of the message that is not whole"
    assert open_descriptors() == before


def test_descriptors_that_were_announced_and_did_not_come() -> None:
    before = open_descriptors()
    with raw() as (sock, channel):
        sock.sendall(frame(msgspec.msgpack.encode(RankHome(1)), 1))
        with pytest.raises(msgspec.DecodeError, match="1 descriptors announced, 0 came"):
            channel.receive()
    assert open_descriptors() == before


def test_too_much_is_refused_by_the_sender(ends: Ends) -> None:
    _, rank = ends
    with pytest.raises(ValueError, match="17 descriptors; expected at most"):
        rank.send(RankHome(1), [0] * 17)


# -- ends that close -------------------------------------------------------------------------------------------------


def test_the_last_words_are_heard_before_the_end(ends: Ends) -> None:
    runner, rank = ends
    rank.send(CellFinished())
    rank.send(RankInput("bye"))
    rank.close()
    heard = iter(runner.receive_available())
    assert [next(heard)[0] for _ in range(2)] == [CellFinished(), RankInput("bye")]
    with pytest.raises(ChannelClosedError):
        next(heard)
    with pytest.raises(ChannelClosedError):
        runner.receive()


def test_sending_to_whoever_has_gone(ends: Ends) -> None:
    runner, rank = ends
    rank.close()
    with pytest.raises(ChannelClosedError):
        runner.send(Exit())


def test_an_end_that_closes_with_unread_messages(ends: Ends) -> None:
    """The system reports that as a reset connection."""
    runner, rank = ends
    runner.send(Exit())
    rank.close()
    with pytest.raises(ChannelClosedError):
        runner.receive()
    with pytest.raises(ChannelClosedError):
        list(runner.receive_available())


def test_a_message_that_is_cut_off_is_no_message() -> None:
    with raw() as (sock, channel):
        sock.sendall(frame(b"half of it", size=100))
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosedError):
            channel.receive()


# -- garbage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        msgspec.msgpack.encode({"type": "RankInput"}),
        msgspec.msgpack.encode({"type": "RankInput", "prompt": 3}),
        msgspec.msgpack.encode({"type": "RankDisplay", "kind": "explode", "content": b""}),
        msgspec.msgpack.encode({"type": "RankHome", "size_bytes": -1}),
        msgspec.msgpack.encode(Exit()),
        msgspec.msgpack.encode(CellFinished()) + b"more",
    ],
)
def test_what_is_no_message_is_an_error_of_msgspec(payload: bytes) -> None:
    with raw() as (sock, channel):
        sock.sendall(frame(payload))
        with pytest.raises(msgspec.MsgspecError):
            channel.receive()


def test_a_frame_that_would_fill_the_memory_is_refused_before_it_has_come() -> None:
    with raw() as (sock, channel):
        sock.sendall(frame(b"", size=MAX_FRAME_BYTES + 1))
        with pytest.raises(msgspec.DecodeError, match="expected at most"):
            channel.receive()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(frame) | st.binary(max_size=60).map(lambda p: frame(p, 2)))
def test_garbage_raises_nothing_else(data: bytes) -> None:
    with raw() as (sock, channel):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(msgspec.MsgspecError, ChannelClosedError):
            while True:
                channel.receive()
