"""Random numbers by place: whoever makes an element draws the same, whenever and wherever it is made."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
import threading
from collections.abc import Iterator

_PLACE = struct.Struct("<qqq")


def derive(seed: int, epoch: int, element: int, purpose: bytes = b"element") -> bytes:
    """32 bytes that depend on nothing but the arguments."""
    return hashlib.blake2b(_PLACE.pack(seed, epoch, element), digest_size=32, person=purpose).digest()


def derive_int(seed: int, epoch: int, element: int, purpose: bytes) -> int:
    """A number of 0 to 2**63 - 1 that depends on nothing but the arguments."""
    return int.from_bytes(derive(seed, epoch, element, purpose)[:8], "little") >> 1


def set_seeds(seed: int, epoch: int, element: int, purpose: bytes = b"element") -> None:
    """Seed ``random``, numpy and torch for one element; libraries that are not imported are left alone."""
    digest = derive(seed, epoch, element, purpose)
    random.seed(digest[:8])
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(int.from_bytes(digest[8:12], "little"))
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.manual_seed(int.from_bytes(digest[16:24], "little") >> 1)


class RandomStates:
    """The states of ``random``, numpy and torch, put away while something else draws."""

    def __init__(self) -> None:
        self._states = _get_states()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Have this state in effect; what is drawn moves it, and nothing else."""
        with _in_use:
            before = _get_states()
            _set_states(self._states)
            try:
                yield
            finally:
                self._states = _get_states()
                _set_states(before)


#: The states are the process's, whichever thread draws.
_in_use = threading.Lock()


def _get_states() -> tuple[object, object, object]:
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[object, object, object]) -> None:
    import numpy as np
    import torch

    random.setstate(states[0])  # type: ignore[arg-type]
    np.random.set_state(states[1])  # type: ignore[arg-type]
    torch.set_rng_state(states[2])  # type: ignore[arg-type]
