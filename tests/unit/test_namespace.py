"""A cell that runs in another process does to the notebook what it would have done there: plain Python objects.

Each story is told twice: with the cell run in the notebook's own process, and with the cell run in a child process
that gets its names as a rank does. What has to hold afterwards is the same.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass

import pytest
from unit.roundtrip import Notebook


@dataclass(frozen=True)
class Story:
    """An earlier cell, the cell under test, and what holds afterwards; ``alias`` names are what the cell can't see."""

    name: str
    before: str
    cell: str
    after: str

    def tell(self, notebook: Notebook, where: str) -> None:
        """Go through the story, with the cell "elsewhere" or in the notebook itself."""
        notebook.run(textwrap.dedent(self.before))
        if where == "elsewhere":
            trip = notebook.cell(textwrap.dedent(self.cell))
            assert (trip.not_home, trip.problems, trip.refused) == ({}, [], {})
        else:
            notebook.run(textwrap.dedent(self.cell))
        notebook.run(textwrap.dedent(self.after))


STORIES = [
    Story(
        "containers change in place",
        """
        from collections import Counter, OrderedDict, defaultdict, deque
        numbers, table, members, raw = [1], {"a": 1}, {1}, bytearray(b"ab")
        line, count, ordered, groups = deque([1, 2], maxlen=3), Counter("aab"), OrderedDict(a=1, b=2), defaultdict(list)
        alias = numbers, table, members, raw, line, count, ordered, groups
        """,
        """
        numbers.append(2); table["b"] = numbers; members.add(2); raw += b"c"
        line.extend([3, 4]); count.update("bcc"); ordered.move_to_end("a"); groups["x"].append(1)
        """,
        """
        assert alias[0] == [1, 2] and alias[1] == {"a": 1, "b": [1, 2]} and alias[1]["b"] is alias[0]
        assert alias[2] == {1, 2} and alias[3] == bytearray(b"abc")
        assert list(alias[4]) == [2, 3, 4] and alias[4].maxlen == 3
        assert alias[5] == Counter("aabbcc") and list(alias[6]) == ["b", "a"]
        assert alias[7] == {"x": [1]} and alias[7]["new"] == []
        assert all(a is b for a, b in zip(alias, (numbers, table, members, raw, line, count, ordered, groups)))
        """,
    ),
    Story(
        "files that are closed",
        f"import os, pathlib, tempfile; path = os.path.join(tempfile.gettempdir(), 'closed-{os.getpid()}.txt')",
        """
        with open(path, "w") as text: text.write("written")
        with open(path, "rb") as raw: length = len(raw.read())
        with open(path, "ab", buffering=0) as unbuffered: pass
        """,
        """
        files = text, raw, unbuffered
        assert all(file.closed and file.name == path for file in files) and length == 7 and text.mode == "w"
        pathlib.Path(path).unlink(missing_ok=True)
        """,
    ),
    Story(
        "names that meet in one object still meet",
        "a = [1]; b = a; holder = {'inner': a}; alias = holder['inner']",
        "b.append(2); c = holder['inner']; holder['outer'] = c",
        "assert a is b is c is alias is holder['inner'] is holder['outer'] and a == [1, 2]",
    ),
    Story(
        "a name is bound to another name's object",
        "a, b = [1], [2]; alias = a, b",
        "a, b = b, a; a.append(3)",
        "assert a is alias[1] and b is alias[0] and a == [2, 3]",
    ),
    Story(
        "cycles",
        "loop = [1]; loop.append(loop); node = {'me': None}; node['me'] = node; alias = loop",
        "loop.append(node); node['loop'] = loop; new = []; new.append((new, loop))",
        """
        assert loop is alias and loop[1] is loop and loop[2] is node and node['me'] is node and node['loop'] is loop
        assert new[0][0] is new and new[0][1] is loop
        """,
    ),
    Story(
        "what changed inside of tuples and frozensets",
        "inner = [1]; pair = (inner, ([2],)); alias = inner, pair, pair[1][0]",
        "pair[0].append(5); pair[1][0].append(6)",
        "assert alias[0] == [1, 5] and alias[2] == [2, 6] and pair is alias[1]",
    ),
    Story(
        "names are deleted and made",
        "gone, stays = 1, [2]",
        "del gone; made = stays; import json as js; from os import path",
        "assert 'gone' not in globals() and made is stays and js.dumps(1) == '1' and path.join('a', 'b') == 'a/b'",
    ),
    Story(
        "None, numbers and strings are bound anew",
        "a, b, c, d = None, 1, 'x', (1, 2)",
        "a, b, c, d = b, None, c + 'y', d + (3,)",
        "assert (a, b, c, d) == (1, None, 'xy', (1, 2, 3))",
    ),
    Story(
        "a global is counted up through functions",
        """
        step, log = 0, []
        def advance():
            global step
            step += 1
            note()
        def note(): log.append(step)
        alias = log
        """,
        "advance(); advance(); step += 10; advance(); seen = step",
        "assert step == seen == 13 and alias is log and log == [1, 2, 13]; advance(); assert step == 14",
    ),
    Story(
        "functions, lambdas and partials see the notebook's globals",
        """
        import functools
        factor = 2
        scale = lambda x: x * factor
        def apply(f, *args, offset=[0]): return f(*args) + offset[0]
        twice = functools.partial(apply, scale)
        """,
        """
        before = twice(3)
        factor = 5
        after = twice(3)
        apply.__defaults__ = ()
        apply.__kwdefaults__["offset"].append(1)
        apply.calls = 2
        made = lambda: factor
        """,
        """
        assert (before, after, twice(3), made()) == (6, 15, 15, 5)
        factor = 7
        assert twice(3) == 21 and made() == 7 and apply.calls == 2 and apply.__kwdefaults__ == {"offset": [0, 1]}
        """,
    ),
    Story(
        "closures keep their variables, shared ones too",
        """
        def counter(start):
            count = start
            def up():
                nonlocal count
                count += 1
                return count
            def get(): return count
            return up, get
        up, get = counter(10)
        alias = get
        """,
        "up(); up(); seen = get()",
        "assert seen == 12 and alias() == 12 and up() == 13 and alias() == get() == 13",
    ),
    Story(
        "bound methods and callables in containers",
        """
        class Meter:
            def __init__(self): self.total = 0
            def add(self, n): self.total += n
        meter = Meter(); add = meter.add; hooks = {"end": [meter.add]}
        alias = meter
        """,
        "add(1); hooks['end'][0](2); hooks['start'] = meter.add",
        """
        assert alias.total == 3; hooks['start'](1); add(1)
        assert alias.total == 5 and hooks['start'].__self__ is meter
        """,
    ),
    Story(
        "instances keep class and identity",
        """
        class Base:
            shared = []
            def hello(self): return type(self).__name__, self.level
        class Thing(Base):
            level = 1
        thing = Thing(); thing.items = [1]; alias = thing, thing.items, Thing
        """,
        """
        thing.items.append(2); thing.level = 2; thing.made = Thing()
        Base.shared.append(thing); Thing.level = 3
        Thing.extra = lambda self: self.level + 1
        class Later(Thing): pass
        later = Later()
        """,
        """
        assert alias[0] is thing and alias[1] == [1, 2] and alias[1] is thing.items and alias[2] is Thing
        assert isinstance(thing.made, Thing) and thing.made.level == 3 and thing.hello() == ("Thing", 2)
        assert Base.shared == [thing] and thing.extra() == 3
        assert issubclass(Later, Thing) and isinstance(later, Base) and later.hello() == ("Later", 3)
        """,
    ),
    Story(
        "a class that is defined anew, with an instance of the old one",
        """
        class Config: version = 1
        old = Config(); Old = Config; alias = Config
        """,
        """
        class Config: version = 2
        new = Config(); old.seen = True
        """,
        """
        assert type(old) is alias is Old and old.version == 1 and old.seen
        assert type(new) is Config and Config is not alias and new.version == 2
        """,
    ),
    Story(
        "dataclasses: plain, slots, frozen",
        """
        from dataclasses import dataclass, field, replace
        @dataclass
        class Plain:
            a: int
            b: list = field(default_factory=list)
        @dataclass(slots=True)
        class Slotted:
            a: int
            b: list
        @dataclass(frozen=True)
        class Frozen:
            a: int
            b: list
        @dataclass(frozen=True, slots=True)
        class Both:
            a: int
            b: list
        plain, slotted, frozen, both = Plain(1), Slotted(1, []), Frozen(1, []), Both(1, [])
        alias = plain, slotted, frozen, both
        """,
        """
        plain.a = slotted.a = 2
        for each in plain, slotted, frozen, both: each.b.append(each.a)
        frozen2 = replace(frozen, a=3); both2 = replace(both, a=3)
        """,
        """
        assert alias == (Plain(2, [2]), Slotted(2, [2]), Frozen(1, [1]), Both(1, [1]))
        assert all(a is b for a, b in zip(alias, (plain, slotted, frozen, both)))
        assert frozen2 == Frozen(3, [1]) and both2 == Both(3, [1]) and both2.b is both.b and frozen2.b is frozen.b
        """,
    ),
    Story(
        "slots, inherited and beside a dict",
        """
        class A: __slots__ = ("x", "never")
        class B(A): __slots__ = ("y",)
        class C(A): pass
        b, c = B(), C(); b.x, b.y, c.x, c.z = [1], 2, 3, 4; alias = b, c
        """,
        """
        b.x.append(2); b.y = 5; del c.x; c.never = 6; del c.z; c.w = 7
        new = B(); new.x = b
        try: new.z = 1
        except AttributeError: refused = True
        """,
        """
        assert refused and new.x is b and not hasattr(new, "__dict__")
        assert alias[0].x == [1, 2] and alias[0].y == 5 and not hasattr(b, "never")
        assert not hasattr(alias[1], "x") and alias[1].never == 6 and vars(alias[1]) == {"w": 7}
        """,
    ),
    Story(
        "enums and namedtuples",
        """
        import enum
        from collections import namedtuple
        from typing import NamedTuple
        class Color(enum.Enum):
            RED = 1
            BLUE = 2
        class Bits(enum.Flag):
            A = 1
            B = 2
        Point = namedtuple("Point", "x y")
        class Row(NamedTuple):
            k: str
            v: list
        here, row, color = Point(1, 2), Row("a", [1]), Color.RED
        alias = row.v
        """,
        """
        row.v.append(2); here = here._replace(x=5)
        color = Color.BLUE; both = Bits.A | Bits.B; found = {Color.RED: row}
        """,
        """
        assert row.v is alias == [1, 2] and type(here) is Point and here == (5, 2)
        assert color is Color.BLUE and both == Bits.A | Bits.B and found[Color.RED].v is alias
        """,
    ),
    Story(
        "metaclasses, abstract classes, properties, descriptors",
        """
        import abc
        class Registry(type):
            known = []
            def __new__(mcs, name, bases, ns):
                cls = super().__new__(mcs, name, bases, ns)
                mcs.known.append(name)
                return cls
        class Plugin(metaclass=Registry): pass
        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...
        class Square(Shape):
            def __init__(self, side): self._side = side
            def area(self): return self._side ** 2
            @property
            def side(self): return self._side
            @side.setter
            def side(self, value): self._side = value
            @classmethod
            def unit(cls): return cls(1)
            @staticmethod
            def corners(): return 4
        square = Square(2); alias = square
        """,
        """
        square.side = 3
        class Circle(Shape):
            def area(self): return 3
        class Other(Plugin): pass
        unit, circle = Square.unit(), Circle()
        """,
        """
        assert alias.area() == 9 and alias.side == 3 and unit.area() == 1 and isinstance(circle, Shape)
        assert type(Other) is Registry and "Other" in Registry.known and Square.corners() == 4
        try: Shape()
        except TypeError: pass
        else: raise AssertionError("an abstract class can be instantiated")
        """,
    ),
    Story(
        "__getstate__, __setstate__ and __reduce__ of the user's own",
        """
        import threading
        class Guarded:
            def __init__(self): self.items, self.lock = [1], threading.Lock()
            def __getstate__(self): return {"items": self.items}
            def __setstate__(self, state): self.items, self.lock = state["items"], threading.Lock()
        class Packed:
            def __init__(self, n): self.n = n
            def __reduce__(self): return Packed, (self.n,)
        class Doubled:
            def __init__(self, n): self.n = n
            def __getstate__(self): return {"half": self.n / 2}
            def __setstate__(self, state): self.n = state["half"] * 2
        guarded, packed, doubled = Guarded(), Packed(1), Doubled(4)
        alias = guarded.items
        """,
        """
        with guarded.lock: guarded.items.append(2)
        packed.n = 5; doubled.n = 6; holder = [packed, doubled]
        """,
        """
        assert guarded.items == [1, 2] and guarded.items is alias and guarded.lock.acquire(timeout=1)
        assert packed.n == 5 and doubled.n == 6 and holder == [packed, doubled]
        """,
    ),
    Story(
        "subclasses of builtins with attributes",
        """
        class Config(dict):
            def __getattr__(self, name): return self[name]
        class Series(list): pass
        config, series = Config(lr=0.1), Series([1]); series.unit = "m"; alias = config, series
        """,
        "config['lr'] = 0.5; config['sub'] = Config(a=1); series.append(2); series.unit = 'km'; series.extra = config",
        """
        assert alias[0].lr == 0.5 and alias[0].sub.a == 1 and type(alias[0]) is Config
        assert alias[1] == [1, 2] and alias[1].unit == "km" and alias[1].extra is alias[0]
        """,
    ),
    Story(
        "weak references",
        """
        import weakref
        class Node: pass
        node = Node(); node.children = [Node()]; node.children[0].parent = weakref.ref(node)
        alias = node
        """,
        """
        node.children[0].parent().mark = 1
        other = Node(); other.parent = weakref.ref(node); node.children.append(other)
        """,
        "assert alias.mark == 1 and alias.children[0].parent() is alias and alias.children[1].parent() is alias",
    ),
    Story(
        "exceptions as values",
        "class MyError(Exception): pass\nerrors = []; alias = errors",
        """
        try: raise MyError("bad", 1)
        except MyError as error: error.code = 7; errors.append(error)
        """,
        "assert type(alias[0]) is MyError and alias[0].args == ('bad', 1) and alias[0].code == 7",
    ),
    Story(
        "a module that was made by hand",
        """
        import types
        tools = types.ModuleType("tools"); exec("state = [1]\\ndef add(x): state.append(x)", vars(tools))
        box = types.SimpleNamespace(n=1); alias = tools, box
        """,
        "tools.add(2); seen = list(tools.state); box.n = 2; box.m = [box]",
        "assert seen == [1, 2] and alias[1].n == 2 and alias[1].m[0] is alias[1] and tools.__name__ == 'tools'",
    ),
    Story(
        "imported modules are themselves",
        "import os, json, collections.abc as cabc; mods = {'j': json}",
        "mods['o'] = os; name = json.__name__; import xml.dom",
        "import sys; assert mods['o'] is os and mods['j'] is json and xml is sys.modules['xml'] and cabc.Mapping",
    ),
    Story(
        "class bodies with annotations, generics and docs",
        """
        from typing import Generic, TypeVar
        T = TypeVar("T")
        class Stack(Generic[T]):
            "A stack."
            size: int = 0
            def push(self, item: T) -> None: self.size += 1; self.last = item
        stack = Stack[int](); alias = stack
        """,
        "stack.push(5); Stack.limit = 9; doc = Stack.__doc__",
        """
        assert alias.size == 1 and alias.last == 5 and alias.limit == 9
        assert doc == 'A stack.' and Stack[str]().size == 0
        """,
    ),
    Story(
        "sets of instances and instances as keys",
        """
        class Key: pass
        a, b = Key(), Key(); group, table = {a}, {a: 1}; alias = group, table
        """,
        "group.add(b); table[b] = 2; table[a] += 10; group2 = frozenset([a, b])",
        "assert alias[0] == {a, b} and alias[1] == {a: 11, b: 2} and group2 == {a, b}",
    ),
    Story(
        "pandas changes in place",
        """
        import pandas as pd
        frame = pd.DataFrame({"a": [1, 2, 3], "b": [1.0, 2.0, 3.0], "c": ["x", "y", "z"]})
        series = pd.Series([1, 2, 3], name="s"); alias = frame, series
        """,
        """
        frame.loc[0, "a"] = 77; frame["d"] = frame["b"] * 2; frame.loc[2, "c"] = "w"; series[1] = 50
        summary = frame.describe(); index = frame.set_index("c")
        """,
        """
        assert frame["a"].tolist() == [77, 2, 3] and frame["d"].tolist() == [2.0, 4.0, 6.0]
        assert frame["c"].tolist() == ["x", "y", "w"]
        assert series.tolist() == [1, 50, 3] and summary.loc["count", "a"] == 3 and index.loc["w", "a"] == 3
        assert alias[0] is frame and alias[1] is series
        """,
    ),
]


@pytest.mark.parametrize("where", ["in the notebook", "elsewhere"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_cell_does_what_it_would_have_done_here(notebook: Notebook, story: Story, where: str) -> None:
    story.tell(notebook, where)


def test_what_the_cell_changed_before_it_failed_comes_home(notebook: Notebook) -> None:
    notebook.run("log = []; alias = log")
    trip = notebook.cell("log.append(1); made = log; 1 / 0; log.append(2)", fails=True)
    assert "ZeroDivisionError" in trip.error
    assert notebook["alias"] == [1]
    assert notebook["made"] is notebook["log"] is notebook["alias"]


def test_nothing_changed_means_nothing_is_sent(notebook: Notebook) -> None:
    notebook.run("import numpy as np; data = np.ones(100_000); table = {'d': data, 'f': lambda: table}")
    trip = notebook.cell("total = data.sum() + len(table)")
    assert list(trip.home.bindings) == ["total"]
    assert trip.home_bytes < 2000
    assert trip.sent_bytes > 800_000


def test_the_result_is_the_object_in_the_notebook(notebook: Notebook) -> None:
    notebook.run("table = {'inner': [1]}; alias = table['inner']")
    trip = notebook.cell("result = table['inner']; result.append(2)")
    assert trip.result is notebook["alias"]


def test_what_cannot_come_home_is_named_and_the_rest_comes(notebook: Notebook) -> None:
    notebook.run("table, lock_before = {'a': 1}, 'old'\nclass Box: pass\nbox = Box(); alias = table")
    trip = notebook.cell(
        "import threading\ntable['b'] = 2; table['lock'] = threading.Lock(); box.n = 1; box.lock = threading.Lock()\n"
        "lock_before = threading.Lock(); good = [1]; gen = (i for i in good)"
    )
    assert set(trip.not_home) == {"table['lock']", "box.lock", "lock_before", "gen"}
    assert all("pickle" in reason for reason in trip.not_home.values())
    assert notebook["alias"] == {"a": 1, "b": 2}
    assert notebook["lock_before"] == "old"
    assert notebook["box"].n == 1
    assert not hasattr(notebook["box"], "lock")
    assert notebook["good"] == [1]
    assert "gen" not in notebook


def test_a_list_that_got_what_cannot_come_home_says_so(notebook: Notebook) -> None:
    notebook.run("items, other = [1], [1]; alias = items")
    trip = notebook.cell("import threading; items.append(threading.Lock()); other.append(2)")
    assert list(trip.not_home) == ["items"]
    assert notebook["alias"] == [1]
    assert notebook["other"] == [1, 2]


def test_what_the_notebook_cannot_load_is_left_out(notebook: Notebook) -> None:
    notebook.run("keep = [1]")
    trip = notebook.cell(
        "import sys, types\n"
        "module = sys.modules['only_there'] = types.ModuleType('only_there')\n"
        "class Here: pass\n"
        "Here.__module__, module.Here = 'only_there', Here\n"
        "bad = Here(); keep.append(2); good = 5; del Here, module"
    )
    assert list(trip.refused) == ["bind bad"]
    assert "only_there" in trip.refused["bind bad"]
    assert "bad" not in notebook
    assert notebook["keep"] == [1, 2]
    assert notebook["good"] == 5


def test_an_object_that_only_its_pickle_can_compare_is_bound_anew(notebook: Notebook) -> None:
    notebook.run("import random; rng = random.Random(0); other = random.Random(1); control = random.Random(0)")
    other = notebook["other"]
    notebook.cell("first = rng.random(); other")
    assert notebook["first"] == notebook["control"].random()
    assert notebook["rng"].random() == notebook["control"].random()
    assert notebook["other"] is other


def test_a_bystander_is_not_touched(notebook: Notebook) -> None:
    notebook.run("import threading; lock = threading.Lock(); x = 1")
    notebook.cell("y = x + 1")
    assert notebook["y"] == 2


def test_a_name_that_may_be_needed_stays_behind_with_its_reason(notebook: Notebook) -> None:
    notebook.run("import threading; lock = threading.Lock()\ndef f(kind):\n    return lock if kind else 1")
    packed = notebook.pack("x = eval('lock')")
    packed.parcel.close()
    assert "lock" in packed.left_out
