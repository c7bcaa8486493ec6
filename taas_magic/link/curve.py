"""Sockets that encrypt, and let in only whoever has a key that was authorised (CurveZMQ)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

#: A packet is a head and one part of at most so much.
MAX_PACKET_BYTES = 2**27
#: Whoever connects has so long to say who he is.
_HANDSHAKE_MS = 5_000
_BACKLOG = 256
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_NUM_ZAP_FRAMES = 6


def listening_socket(context: zmq.Context[Any], address: str, keys: tuple[str, str]) -> zmq.Socket[bytes]:
    """A socket that others connect to; ``Authenticator`` says who may.

    Raises:
        zmq.ZMQError: if the address is taken, or is none.
    """
    sock: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _prepare(sock, *keys)
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.ZAP_DOMAIN, b"taas")
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sock.setsockopt(zmq.BACKLOG, _BACKLOG)
    # A client that connects anew is the same one, though its old connection does not know of its end yet.
    sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    sock.setsockopt(zmq.IPV6, 1)
    sock.bind(address)
    return sock


def connected_socket(
    context: zmq.Context[Any], address: str, server_key: str, keys: tuple[str, str], identity: bytes
) -> zmq.Socket[bytes]:
    """A socket that connects to a listening one, and connects again whenever that is necessary.

    Args:
        context: Where it belongs.
        address: Where to connect.
        server_key: The public key of whoever must be there.
        keys: The own public and secret key.
        identity: By which the other side knows it again.
    """
    sock: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _prepare(sock, *keys)
    sock.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    sock.setsockopt(zmq.ROUTING_ID, identity)
    sock.setsockopt(zmq.RECONNECT_IVL, 100)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    sock.setsockopt(zmq.IPV6, 1)
    sock.connect(address)
    return sock


def _prepare(sock: zmq.Socket[bytes], public: str, secret: str) -> None:
    sock.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    sock.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
    sock.setsockopt(zmq.LINGER, 500)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_PACKET_BYTES)
    # How much is on its way is bounded above this.
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)


class Authenticator:
    """Answers for a context which keys may speak (ZAP, https://rfc.zeromq.org/spec/27).

    Args:
        context: The context of the listening socket.
        is_authorized: Says of a public key, in Z85, whether it may.
    """

    def __init__(self, context: zmq.Context[Any], is_authorized: Callable[[str], bool]) -> None:
        self._is_authorized = is_authorized
        #: Who was turned away, and how often.
        self.refused: dict[str, int] = {}
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer what is asked; to be called when ``socket`` can be read."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer, question = frames[: frames.index(b"") + 1], frames[frames.index(b"") + 1 :]
            self.socket.send_multipart([*peer, *self._answer(question)])

    def _answer(self, question: list[bytes]) -> list[bytes]:
        number = question[1] if len(question) > 1 else b""
        if len(question) <= _NUM_ZAP_FRAMES or question[0] != _ZAP_VERSION or question[5] != b"CURVE":
            return [_ZAP_VERSION, number, b"400", b"CURVE is needed", b"", b""]
        key = z85.encode(question[6]).decode()
        if self._is_authorized(key):
            # The key becomes the "User-Id" of every message.
            return [_ZAP_VERSION, number, b"200", b"OK", key.encode(), b""]
        self.refused[key] = self.refused.get(key, 0) + 1
        return [_ZAP_VERSION, number, b"400", b"not authorised", b"", b""]

    def close(self) -> None:
        """Answer nobody any more."""
        self.socket.close()
