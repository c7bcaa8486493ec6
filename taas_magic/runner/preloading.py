"""Keeps a zygote that has imported what the notebook has, beside the plain one."""

from __future__ import annotations

from taas_magic.channel import ChannelClosedError
from taas_magic.runner.zygote_link import PreloadedZygote, ZygoteLink
from taas_magic.wire import Preload
from taas_magic.wire_zygote import Preloaded, PreloadRefused


class Preloading:
    """Forks a new preloaded zygote whenever the notebook has imported more, and lets go of the one before.

    Runs are children of the zygote that forked them, so nothing is exchanged while one is active.
    """

    def __init__(self, zygote: ZygoteLink) -> None:
        self._zygote = zygote
        self._wanted: Preload | None = None
        self._current: PreloadedZygote | None = None
        #: Modules that make forking unsafe, with the reason.
        self.refused: dict[str, str] = {}

    def want(self, order: Preload) -> None:
        """Note what the notebook has imported."""
        self._wanted = order

    @property
    def is_settled(self) -> bool:
        """Whether what is wanted is there, or will not come."""
        return self._wanted is None and (self._current is None or self._current.is_ready)

    @property
    def fileno(self) -> int | None:
        """What to poll for :meth:`hear`."""
        return None if self._current is None else self._current.channel.fileno()

    def advance(self, *, is_idle: bool) -> None:
        """Fork a zygote for what is wanted, if that is new and nothing runs."""
        if not is_idle or self._wanted is None:
            return
        order, current = self._wanted, self._current
        modules = [name for name in order.modules if name not in self.refused]
        if current is not None and current.environment == order.environment:
            if not current.is_ready:
                # What it imports may bring along what is new; that will be seen when it is done.
                return
            # A module that could not be imported there would not be on a second try either.
            if current.loaded.union(current.modules).issuperset(modules):
                self._wanted = None
                return
        self._wanted = None
        self.close()
        if modules:
            self._current = self._zygote.fork_preloaded(modules, order.environment)

    def hear(self) -> None:
        """Take what the preloaded zygote says."""
        current = self._current
        if current is None:
            return
        try:
            for message, _ in current.channel.receive_available():
                if isinstance(message, Preloaded):
                    current.is_ready, current.loaded = True, frozenset(message.loaded)
                elif isinstance(message, PreloadRefused):
                    self.refused[message.module] = message.reason
                    self._wanted = self._wanted or Preload(current.modules, current.environment)
        except ChannelClosedError:
            self.close()

    @property
    def ready(self) -> PreloadedZygote | None:
        """The preloaded zygote, if its imports are done."""
        return self._current if self._current is not None and self._current.is_ready else None

    def fit_for(self, environment: dict[str, str]) -> PreloadedZygote | None:
        """The preloaded zygote, if it is ready and was made in the environment that a run wants.

        Libraries read variables when they are imported, so another environment needs other imports.
        """
        ready = self.ready
        return ready if ready is not None and ready.environment == environment else None

    def close(self) -> None:
        """End the preloaded zygote."""
        if self._current is not None:
            self._current.channel.close()
            self._current = None
