"""A machine's runner stays up, whatever comes in, and serves those who may come in."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from runners import Runner, started

from taas_magic.link.curve import connected_socket
from taas_magic.link.reliable import ReliableStream
from taas_magic.machines.keys import KeyPair, new_keys
from taas_magic.versions import own_versions
from taas_magic.wire_machines import CloseSession, FromMachine, OpenSession, SessionEnded, SessionOpened

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

NUM_INPUTS = 100_000
NUM_CONNECTIONS = 2_000
MOST_MIB = 400
SOON_S = 60.0


@pytest.fixture
def runner(tmp_path: Path, private_temp: Path) -> Iterator[Runner]:
    with started(tmp_path, num_gpus=2) as made:
        yield made


def opened(runner: Runner) -> SessionOpened | SessionEnded:
    """Open a session as a notebook does, and close it."""
    connection = runner.session()
    try:
        connection.send(OpenSession(own_versions(), "tests", 10.0))
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            connection.socket.poll(100)
            for message, _ in connection.receive():
                if isinstance(message, SessionOpened | SessionEnded):
                    connection.send(CloseSession())
                    return message
            assert not connection.broken, connection.broken
            connection.tick()
        raise AssertionError("no answer")
    finally:
        connection.close()


def speak(runner: Runner, keys: KeyPair, identity: bytes) -> zmq.Socket[bytes]:
    return connected_socket(zmq.Context.instance(), runner.address, runner.key, (keys.public, keys.secret), identity)


def test_garbage_from_someone_who_may_come_in_ends_his_own_conversation(runner: Runner) -> None:
    """Frames of all kinds, packets that are right and carry nonsense, messages cut short, packets said again."""
    chance = random.Random(4)
    messages = [msgspec.msgpack.encode(each) for each in (OpenSession(own_versions(), "x", 9.0), CloseSession())]
    sent = 0
    while sent < NUM_INPUTS:
        sock = speak(runner, runner.authorized, chance.randbytes(16))
        stream = ReliableStream(0.0)
        for _ in range(1000):
            sock.send_multipart(garbage(chance, stream, messages))
        sent += 1000
        # Its answers are not read; it must not matter.
        sock.close(linger=2000)
    assert isinstance(opened(runner), SessionOpened)
    assert runner.process.poll() is None
    assert runner.memory_mib < MOST_MIB


def garbage(chance: random.Random, stream: ReliableStream, messages: list[bytes]) -> list[bytes]:
    kind = chance.randrange(6)
    if kind == 0:
        return [chance.randbytes(chance.randrange(40)) for _ in range(chance.randint(1, 4))]
    if kind == 1:
        return stream.send([chance.choice([b"m", b"a", b"c", b"f", b"x"]), chance.randbytes(chance.randrange(60))], 0.0)
    if kind == 2:
        message = chance.choice(messages[1:])
        return stream.send([b"m", message[: chance.randrange(len(message))]], 0.0)
    if kind == 3:
        # A file larger than any memory.
        return stream.send([b"a", chance.randbytes(16), (2**60).to_bytes(8, "little")], 0.0)
    frames = stream.send([b"m", messages[1]], 0.0)
    if kind == 4:
        head = bytearray(frames[0])
        head[chance.randrange(len(head))] ^= 1 << chance.randrange(8)
        return [bytes(head), *frames[1:]]
    return frames


def test_whoever_has_no_key_is_not_listened_to(runner: Runner) -> None:
    stranger = new_keys()
    sock = speak(runner, stranger, b"stranger")
    sock.send_multipart(ReliableStream(0.0).send([b"m", msgspec.msgpack.encode(CloseSession())], 0.0))
    assert sock.poll(1500) == 0
    sock.close(linger=0)
    wrong = connected_socket(
        zmq.Context.instance(),
        runner.address,
        new_keys().public,
        (runner.authorized.public, runner.authorized.secret),
        b"wrong",
    )
    wrong.send_multipart([b"hello"])
    assert wrong.poll(1000) == 0
    wrong.close(linger=0)
    assert isinstance(opened(runner), SessionOpened)


def test_a_flood_of_connections_that_say_nothing_or_nonsense(runner: Runner) -> None:
    chance = random.Random(5)
    held: list[socket.socket] = []
    with contextlib.ExitStack() as closing:
        for number in range(NUM_CONNECTIONS):
            try:
                sock = socket.create_connection(("127.0.0.1", runner.port), timeout=5)
            except OSError:
                continue
            with contextlib.suppress(OSError):
                sock.sendall(chance.randbytes(chance.randrange(1, 200)))
            if number % 10:
                sock.close()
            else:
                held.append(closing.enter_context(sock))
        # Half a greeting, and then nothing: others are served meanwhile.
        assert isinstance(opened(runner), SessionOpened)
    assert held
    assert runner.process.poll() is None


def test_versions_are_compared_before_anything_else(runner: Runner) -> None:
    connection = runner.session()
    versions = msgspec.structs.replace(own_versions(), python="2.7.18")
    connection.send(OpenSession(versions, "tests", 10.0))
    found: list[FromMachine] = []
    deadline = time.monotonic() + SOON_S
    while not found and time.monotonic() < deadline:
        connection.socket.poll(100)
        found += [message for message, _ in connection.receive()]
        connection.tick()
    connection.close()
    (ended,) = found
    assert isinstance(ended, SessionEnded)
    assert "versions differ: python 2.7.18 and " in ended.reason
