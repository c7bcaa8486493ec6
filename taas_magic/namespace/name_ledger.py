"""The books of a walk through a cell: which names are settled where the walk stands, what was read, what was bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

#: Names bound or deleted on every path to a place; None for a place that no path leads to.
Settled = set[str] | None


@dataclass(frozen=True)
class CellNames:
    """The names of one cell. Builtins are among them; the caller keeps what the notebook has.

    Names such as ``__name__`` and IPython's own ``get_ipython`` are left out: every process has its own.

    Attributes:
        needed: Read before the cell surely bound them, in order of first use: they must travel.
        maybe: Perhaps read (later than a binding, or by name in a string): they travel if they can.
        bound: What the cell may bind or delete at top level, ``global`` in its functions included.
    """

    needed: tuple[str, ...]
    maybe: tuple[str, ...]
    bound: frozenset[str]


@dataclass(frozen=True)
class ClassScope:
    """A class body that is being walked: its own names are settled under a key that no other scope shares."""

    name: str
    number: int
    global_names: frozenset[str]

    def key(self, name: str) -> str:
        """What stands for the class's own ``name`` among the settled; the space keeps it apart from any identifier."""
        return f"{name} {self.number}"

    def mangled(self, name: str) -> str:
        """Python's name for a private name in a class (language reference, "Identifiers")."""
        stem = self.name.lstrip("_")
        return f"_{stem}{name}" if stem and name.startswith("__") and not name.endswith("__") else name


@dataclass(frozen=True)
class _Use:
    """One read of a name that was not settled.

    Attributes:
        name: The name.
        is_certain: False for a read that may not take place, or not of this name.
        num_binds: For a read by a function, how many bindings stood before it: if the name is bound later, the
            function may have been called before or after that.
    """

    name: str
    is_certain: bool
    num_binds: int | None = None


class NameLedger:
    """Keeps the books while a cell is walked."""

    def __init__(self) -> None:
        #: Where the walk stands.
        self.settled: Settled = set()
        #: Names of comprehensions and type parameters around: they hide the notebook's.
        self.hidden: frozenset[str] = frozenset()
        #: Classes that have their name before any of their methods can run.
        self.promised: frozenset[str] = frozenset()
        #: The class body around, if its names are seen.
        self.class_scope: ClassScope | None = None
        self._class_numbers = itertools.count()
        self._uses: list[_Use] = []
        #: Bindings by statements of the cell, in order.
        self._binds: list[str] = []
        #: Bindings that no statement of the cell shows: in functions, in strings.
        self._other_binds: set[str] = set()

    def enter_class(self, name: str, global_names: Iterable[str]) -> None:
        """Read and bind in the body of class ``name`` from here on, until ``class_scope`` is set to something else."""
        self.class_scope = ClassScope(name, next(self._class_numbers), frozenset(global_names))

    def read(self, name: str) -> None:
        """The cell reads ``name`` here."""
        scope = self.class_scope
        if scope is not None:
            name = scope.mangled(name)
            if self.settled is None or scope.key(name) in self.settled:
                return
        if self._can_be_the_notebooks(name):
            self._uses.append(_Use(name, is_certain=True))

    def read_later(self, name: str) -> None:
        """Code defined here reads ``name`` when it is called; it doesn't see the names of a class body around it."""
        if self.class_scope is not None:
            name = self.class_scope.mangled(name)
        if self._can_be_the_notebooks(name) and name not in self.promised:
            self._uses.append(_Use(name, is_certain=True, num_binds=len(self._binds)))

    def read_perhaps(self, names: Iterable[str]) -> None:
        """Reads that may not take place, or not of these names; what is no identifier is passed over."""
        self._uses += [_Use(name, is_certain=False) for name in names if self._can_be_the_notebooks(name)]

    def bind(self, name: str) -> None:
        """A statement binds ``name`` here."""
        if self.settled is None or name in self.hidden:
            return
        if self.class_scope is not None:
            name = self.class_scope.mangled(name)
            if name not in self.class_scope.global_names:
                self.settled.add(self.class_scope.key(name))
                return
        self.settled.add(name)
        self._binds.append(name)

    def unbind(self, name: str) -> None:
        """After ``del``, a class body sees the global name again; at top level the notebook's is gone as well."""
        self.bind(name)
        if self.class_scope is not None and self.settled is not None:
            self.settled.discard(self.class_scope.key(self.class_scope.mangled(name)))

    def bind_elsewhere(self, names: Iterable[str]) -> None:
        """Code that may run, who knows when, binds ``names`` at top level."""
        self._other_binds.update(names)

    def mark(self) -> int:
        """A mark for :meth:`forget_binds`."""
        return len(self._binds)

    def forget_binds(self, mark: int) -> None:
        """The bindings since ``mark`` were in a namespace that is gone."""
        del self._binds[mark:]

    def names(self) -> CellNames:
        """The books, closed."""
        needed: dict[str, None] = {}
        maybe: dict[str, None] = {}
        last_bind = {name: number for number, name in enumerate(self._binds)}
        for use in self._uses:
            is_bound_later = use.num_binds is not None and last_bind.get(use.name, -1) >= use.num_binds
            (needed if use.is_certain and not is_bound_later else maybe)[use.name] = None
        return CellNames(
            needed=tuple(needed),
            maybe=tuple(name for name in maybe if name not in needed),
            bound=frozenset(self._binds) | self._other_binds,
        )

    def _can_be_the_notebooks(self, name: str) -> bool:
        if self.settled is None or name in self.settled or name in self.hidden:
            return False
        return name != "get_ipython" and name.isidentifier() and not (name.startswith("__") and name.endswith("__"))


def copied(settled: Settled) -> Settled:
    """A copy that another path can go on with."""
    return None if settled is None else set(settled)


def joined(ends: Iterable[Settled]) -> Settled:
    """What is settled where paths meet; an end that is None is no path."""
    reached = [end for end in ends if end is not None]
    return set.intersection(*reached) if reached else None
