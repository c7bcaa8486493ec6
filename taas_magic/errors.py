"""The errors that a user can meet.

Each one says three things, in this order: what was found, what was expected, and what to do. ``str(error)``
is the whole text; :meth:`TaasError.of` composes it, so that no message leaves one of the three out.
Every class also derives from the builtin that a caller would think of, so ``except ValueError`` works.
"""

from __future__ import annotations

from typing import Self


class TaasError(Exception):
    """Base of all errors that taas raises by itself (a cell's own exceptions stay what they are)."""

    @classmethod
    def of(cls, found: str, *, expected: str = "", do: str = "") -> Self:
        """Compose an error from what was found, what was expected, and what the user can do.

        Args:
            found: What is the case, with the names and values that matter.
            expected: What would have been right; left out where ``found`` says it.
            do: What to type or change next.
        """
        lines = [found]
        if expected:
            lines.append(f"expected: {expected}")
        if do:
            lines.append(f"to do: {do}")
        return cls("\n".join(lines))


class PragmaError(TaasError, ValueError):
    """The head of a cell is not a valid pragma. Nothing ran."""


class SettingsError(TaasError, ValueError):
    """A settings or environment file is not valid; the text names file, line and key."""


class CannotTravelError(TaasError, TypeError):
    """Something that the cell needs cannot be sent to the ranks. Nothing ran."""


class PlacementError(TaasError, RuntimeError):
    """The place cannot hold the ranks that were asked for. Nothing ran."""


class VersionMismatchError(TaasError, RuntimeError):
    """Kernel and runner differ in a version that matters. Nothing was unpickled."""


class RunnerLostError(TaasError, RuntimeError):
    """The runner ended, or stopped answering, while a run needed it."""


class KeptRanksLostError(TaasError, RuntimeError):
    """Ranks that were kept between cells have ended, and their variables with them. Nothing ran."""


class RankDiedError(TaasError, RuntimeError):
    """A rank's process ended without finishing the cell: a signal, the memory killer, or an exit.

    Attributes:
        rank: The global rank.
        exit_code: As ``subprocess.Popen.returncode``: negative is a signal's number.
    """

    rank: int = -1
    exit_code: int = 0


class RankFailedError(TaasError, RuntimeError):
    """Stands for a rank's exception whose own type cannot be rebuilt in the kernel.

    Attributes:
        rank: The global rank.
        type_name: The qualified name of the original exception type.
    """

    rank: int = -1
    type_name: str = ""


class RunTimeoutError(TaasError, TimeoutError):
    """The run took longer than ``--timeout`` allowed and was stopped."""


class DeliveryError(TaasError, RuntimeError):
    """Data cannot be delivered: nothing can be prepared, or a registration makes no sense."""


class DeliveryLostError(TaasError, RuntimeError):
    """The delivery of data ended while ranks needed it."""


class PoisonElementError(TaasError, RuntimeError):
    """Making an element of a registered loader has ended one producer after the other."""


class ProducerFailedError(TaasError, RuntimeError):
    """Stands for a producer's exception whose own type cannot be rebuilt on the rank."""


class RegistrationError(TaasError, ValueError):
    """A loader cannot be registered, or unregistered, like this."""
