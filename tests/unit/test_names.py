"""Which names a cell needs, perhaps needs, and binds."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from taas_magic.namespace.names import CellNames, globals_of_code, names_of_cell

Transform = Callable[[str], str]


@pytest.fixture(scope="module")
def transform() -> Iterator[Transform]:
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    yield shell.transform_cell
    shell.restore_sys_module_state()  # the shell has put a module of its own in the place of __main__


# cell, needed, maybe, bound; names are separated by blanks, needed ones are in order of first use
STRAIGHT = {
    "nothing": ("", "", "", ""),
    "a read": ("x", "x", "", ""),
    "order of first use": ("b + a\nc(b)", "b a c", "", ""),
    "bound before": ("x = load()\nuse(x)", "load use", "", "x"),
    "bound after": ("use(x)\nx = 1", "use x", "", "x"),
    "bound from itself": ("x = x + 1", "x", "", "x"),
    "augmented": ("x += y", "x y", "", "x"),
    "augmented after binding": ("x = 0\nx += 1", "", "", "x"),
    "attribute target": ("x.a = 1", "x", "", ""),
    "item target": ("x[i] = y", "y x i", "", ""),
    "unpacking": ("a, (b, *c) = d\na, b, c", "d", "", "a b c"),
    "chained": ("a = b = c", "c", "", "a b"),
    "annotated": ("x: T = f()\nx", "f T", "", "x"),
    "annotated only": ("x: int\nx", "int x", "", ""),
    "lazy annotation": ("from __future__ import annotations\nx: T = 1", "", "T", "annotations x"),
    "walrus": ("if (n := f()) > 1:\n    n", "f", "", "n"),
    "walrus that may not run": ("a and (n := 1)\nn", "a n", "", "n"),
    "walrus behind a comparison": ("a < (n := 1) < (m := 2)\nn, m", "a m", "", "n m"),
    "deleted": ("del x", "x", "", "x"),
    "deleted, then read": ("x = 1\ndel x\nx", "", "", "x"),
    "deleted item": ("del x[0]", "x", "", ""),
    "imports": ("import a.b as c, d.e\nfrom f import g as h\nc, d, h", "", "", "c d h"),
    "import hides": ("import a.b as c\na", "a", "", "c"),
    "star import": ("from m import *\nx", "x", "", ""),
    "f-string": ("f'{a!r:>{b}} {c}'", "a b c", "", ""),
    "string": ("'x'", "", "", ""),
    "builtins": ("print(len(x))", "print len x", "", ""),
    "dunders": ("__name__, __file__", "", "", ""),
    "await": ("await f(x)", "f x", "", ""),
    "async": ("async with a as b:\n    async for c in b:\n        c", "a", "", "b c"),
    "a long sum": (" + ".join(f"x{i % 2}" for i in range(900)), "x0 x1", "", ""),
}

BRANCHES = {
    "bound on all": ("if a:\n    x = 1\nelse:\n    x = 2\nx", "a", "", "x"),
    "bound on one": ("if a:\n    x = 1\nx", "a x", "", "x"),
    "bound or raised": ("if a:\n    x = 1\nelse:\n    raise E\nx", "a E", "", "x"),
    "conditional expression": ("(x := 1) if a else (x := 2)\nx", "a", "", "x"),
    "code behind raise": ("raise E\nx", "E", "", ""),
    "for target": ("for i in xs:\n    i\ni", "xs i", "", "i"),
    "bound in a loop": ("for i in xs:\n    y = 1\ny", "xs y", "", "i y"),
    "read in a loop before it is bound": ("for i in xs:\n    y\n    y = 1", "xs y", "", "i y"),
    "loop else": ("for i in xs:\n    break\nelse:\n    y = 1\ny", "xs y", "", "i y"),
    "loop else without break": ("for i in xs:\n    pass\nelse:\n    y = 1\ny", "xs", "", "i y"),
    "endless loop": ("while True:\n    x = f()\n    if x:\n        break\nx", "f", "", "x"),
    "endless loop, early break": ("while 1:\n    if a:\n        break\n    x = 1\nx", "a x", "", "x"),
    "while": ("while (x := f()):\n    y = x\nx, y", "f y", "", "x y"),
    "continue": ("for i in xs:\n    if i:\n        y = 1\n    else:\n        continue\n    y", "xs", "", "i y"),
    "try or import": ("try:\n    import m\nexcept ImportError:\n    m = None\nm", "ImportError", "", "m"),
    "try may bind": ("try:\n    x = f()\nexcept E:\n    pass\nx", "f E x", "", "x"),
    "try else": ("try:\n    f()\nexcept E:\n    raise\nelse:\n    x = 1\nx", "f E", "", "x"),
    "handler sees nothing of the body": ("try:\n    x = f()\nexcept E:\n    x", "f E x", "", "x"),
    "finally": ("try:\n    x = f()\nfinally:\n    x\nx", "f x", "", "x"),
    "finally binds": ("try:\n    f()\nfinally:\n    x = 1\nx", "f", "", "x"),
    "behind try finally": ("try:\n    x = f()\nfinally:\n    g()\nx", "f g", "", "x"),
    "exception name": ("try:\n    f()\nexcept E as e:\n    e\ne", "f E e", "", "e"),
    "exception group": ("try:\n    f()\nexcept* E as e:\n    e", "f E", "", "e"),
    "with": ("with a as b:\n    x = b\nx", "a", "", "b x"),
    "with that swallows": ("with contextlib.suppress(E):\n    x = f()\nx", "contextlib E f x", "", "x"),
    "raise in with": ("with a:\n    raise E\nx", "a E x", "", ""),
    "match captures": (
        (
            "match p:\n    case [x, *rest]:\n        x, rest\n    case {'k': v, **more}:\n        v, more\n"
            "    case Point(a=z) as q:\n        z, q\nx"
        ),
        "p Point x",
        "",
        "x rest v more z q",
    ),
    "match on all": ("match p:\n    case 0:\n        y = 1\n    case _:\n        y = 2\ny", "p", "", "y"),
    "match guard": ("match p:\n    case x if x > t:\n        y = 1\ny", "p t y", "", "x y"),
    "match value": ("match p:\n    case m.A:\n        pass", "p m", "", ""),
    "assert": ("assert a, (m := b)\nm", "a b m", "", "m"),
}

SCOPES = {
    "function reads": ("def f(a, b=d):\n    return a + b + c", "d c", "", "f"),
    "function reads what is bound": ("c = 1\ndef f():\n    return c", "", "", "c f"),
    "function reads what is bound later": ("def f():\n    return c\nc = 1\nf()", "", "c", "f c"),
    "read at once as well": ("def f():\n    return c\nc\nc = 1", "c", "", "f c"),
    "read by itself": ("def f(n):\n    return f(n - 1)", "", "", "f"),
    "decorated, read by itself": ("@d\ndef f(n):\n    return f(n - 1)", "d", "f", "f"),
    "mutually recursive": ("def f():\n    return g()\ndef g():\n    return f()", "", "g", "f g"),
    "lambda": ("f = lambda a, b=d: a + b + c", "d c", "", "f"),
    "function annotations": ("def f(a: A, *b: B, c: C = c0) -> R: ...", "c0 A C B R", "", "f"),
    "lazy function annotations": (
        "from __future__ import annotations\ndef f(a: A) -> R:\n    def g(b: B): ...",
        "",
        "A R",
        "annotations f",
    ),
    "global": ("def f():\n    global step\n    step += 1", "step", "", "f step"),
    "global in nested function": ("def f():\n    def g():\n        global x\n        x = 1", "", "", "f x"),
    "global deleted": ("def f():\n    global x\n    del x", "x", "", "f x"),
    "global bound in a function is not settled": ("def f():\n    global x\n    x = 1\nf()\nx", "x", "", "f x"),
    "nonlocal": ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = y\n    return g", "y", "", "f"),
    "local": ("def f():\n    x = 1\n    return x\nx", "x", "", "f"),
    "async function": ("async def f():\n    await g(x)", "g x", "", "f"),
    "comprehension": ("[x + y for x in xs if x > t]", "xs t y", "", ""),
    "nested comprehension": ("{x: y for x in xs for y in x}", "xs", "", ""),
    "comprehension target is local": ("[x for x in xs]\nx", "xs x", "", ""),
    "comprehension reads its name outside": ("[x for x in x]", "x", "", ""),
    "generator": ("sum(x * k for x in xs)\nk = 1", "sum xs k", "", "k"),
    "walrus in comprehension": ("[(y := f(x), y) for x in xs]\ny", "xs f y", "", "y"),
    "lambda in comprehension": ("[lambda: x + y for x in xs]", "xs y", "", ""),
    "class": (
        "@d\nclass A(B, metaclass=M):\n    a = b\n    c = a\n    def m(self):\n        return z, a",
        "d B M b z a",
        "",
        "A",
    ),
    "class attribute is not global": ("class A:\n    x = 1\n    y = x\nx", "x", "", "A"),
    "class attribute is not seen in methods": ("class A:\n    x = 1\n    def m(self):\n        return x", "x", "", "A"),
    "class attribute on one branch": ("class A:\n    if c:\n        x = 1\n    y = x", "c x", "", "A"),
    "class attribute deleted": ("class A:\n    x = 1\n    del x\n    y = x", "x", "", "A"),
    "class body is at once": ("class A:\n    y = x\nx = 1", "x", "", "A x"),
    "class global": ("class A:\n    global x\n    x = 1\nx", "", "", "A x"),
    "class names itself": ("class A(B):\n    def m(self):\n        super(A, self).m()", "B super", "", "A"),
    "decorated class names itself": ("@d\nclass A:\n    def m(self):\n        return A()", "d", "A", "A"),
    "comprehension in class": ("class A:\n    xs = [1]\n    ys = [y + xs for y in xs]", "xs", "", "A"),
    "private names": ("class A:\n    __p = 1\n    q = __p\n    def m(self):\n        return __g", "_A__g", "", "A"),
    "method reads what is bound later": ("class A:\n    def m(self):\n        return c\nc = 1", "", "c", "A c"),
    "nested classes": ("class A:\n    x = 1\n    class B:\n        y = x", "x", "", "A"),
    "decorator": ("@a.b(c)\ndef f(): ...", "a c", "", "f"),
    "default sees an earlier binding": ("c = 1\ndef f(a=c): ...", "", "", "c f"),
}

MAGICS = {
    "shell": ("!ls {path} $name $$HOME", "path name", "", ""),
    "shell expression": ("!ls {os.path.join(root, 'a')} {names[1:n]}", "os root names n", "", ""),
    "shell that is no expression": ("!awk '{print $1}' f", "", "print", ""),
    "shell braces": ("!echo {{x}}", "", "", ""),
    "shell result": ("files = !ls {path}\nfiles", "path", "", "files"),
    "shell reads what is bound": ("path = 1\n!ls {path}", "", "", "path"),
    "shell in a function": ("def f():\n    !ls {path}", "", "path", "f"),
    "time": ("%time y = train(model)\ny", "train model", "", "y"),
    "time result": ("y = %time train(model)", "train model", "", "y"),
    "time in a branch": ("if a:\n    %time y = 1\ny", "a y", "", "y"),
    "timeit": ("%timeit -n 3 -r2 y = f(x)\ny", "f x y", "", ""),
    "prun": ("%prun -s cumulative f(x)", "f x", "cumulative", ""),
    "lprun": ("%lprun -f g f(x)", "f x", "g", ""),
    "time of no Python": ("%time f x", "", "f x", ""),
    "time of a shell line": ("%time !ls {path}", "path", "", ""),
    "unknown": ("%who_knows -i df --flag other.attr {p}", "p", "df other", ""),
    "inert": ("%matplotlib inline\n%cd {path}", "path", "", ""),
    "help": ("x?", "", "x", ""),
    "whole cell timed": ("%%time\ny = f(x)\ny", "f x", "", "y"),
    "whole cell timed by loops": ("%%timeit -n 1 s = g()\ny = f(s)", "g f", "", ""),
    "captured": ("%%capture --no-stderr out\ny = f(x)", "f x", "", "y out"),
    "magic in magic": ("%%capture out\n%time y = f(x)\n!ls {y} {z}", "f x z", "", "y out"),
    "bash": ("%%bash --out text\necho $HOME {a} x", "", "a HOME", "text"),
    "writefile": ("%%writefile {path}\nimport a\nb = {c}", "path", "c", ""),
    "unknown with Python": ("%%who_knows df\ny = f(x)", "f x", "df", "y"),
    "unknown with something else": ("%%who_knows df\nselect * from {table}", "", "df table", ""),
}

STRINGS = {
    "eval": ("eval('x + y')", "eval", "x y", ""),
    "eval of what is bound": ("x = 1\neval('x')", "eval", "", "x"),
    "exec": ("exec('x = y')", "exec", "y", "x"),
    "globals": ("globals()['x']", "globals", "x", ""),
    "globals bound": ("globals()['x'] = 1", "globals", "", "x"),
    "locals get": ("locals().get('x')", "locals", "x", ""),
    "vars": ("vars()['x']", "vars", "x", ""),
    "vars of something": ("vars(a)['x']", "vars a", "", ""),
    "main": ("import __main__\ngetattr(__main__, 'x'), __main__.y", "getattr", "x y", "__main__"),
    "main module": ("sys.modules['__main__'].x", "sys", "x", ""),
    "query": ("df.query('a > @lo and b < @hi')", "df", "lo hi", ""),
    "query f-string": ("df.query(f'{c} > @lo')", "df c", "lo", ""),
    "frame eval": ("df.eval('a + @b')", "df", "b", ""),
    "pandas eval": ("pd.eval('df1 + df2')", "pd", "df1 df2", ""),
    "in a function": ("def f():\n    return eval('x')", "eval", "x", "f"),
    "needed wins": ("eval('x')\nx", "eval x", "", ""),
    "read and eval": ("def f():\n    return df.query('a > @lo')", "df", "lo", "f"),
}

NEWER = {
    "type parameters": ("def f[T: Bound](a: T, b: U) -> T:\n    x: T\n    return T, y", "Bound U y", "", "f"),
    "class type parameters": ("class A[T](B[T]):\n    def m(self, a: T):\n        return T, y", "B y", "", "A"),
    "type alias": ("type X[T] = list[T] | Y", "list Y", "", "X"),
}

CELLS = {**STRAIGHT, **BRANCHES, **SCOPES, **MAGICS, **STRINGS, **(NEWER if sys.version_info >= (3, 12) else {})}


@pytest.mark.parametrize(("cell", "needed", "maybe", "bound"), CELLS.values(), ids=CELLS.keys())
def test_names(cell: str, needed: str, maybe: str, bound: str, transform: Transform) -> None:
    found = names_of_cell(cell, transform)
    expected = CellNames(tuple(needed.split()), tuple(maybe.split()), frozenset(bound.split()))
    assert found == expected


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("x = 1\ny = = 2", 2),
        ("x = 1\nreturn x", 2),
        ("for i in x:\n    pass\nbreak", 3),
        ("%%time\nx = 1\ny = = 2", 3),
        ("%%capture out\n%%time\n\nreturn", 4),
        ("\n\n  = 1", 3),
    ],
)
def test_a_cell_that_does_not_compile(cell: str, line: int, transform: Transform) -> None:
    with pytest.raises(SyntaxError) as caught:
        names_of_cell(cell, transform)
    assert caught.value.lineno == line


def test_a_magic_that_takes_no_python_may_have_any_body(transform: Transform) -> None:
    assert names_of_cell("%%bash\nfor x in = = 1", transform).needed == ()


def test_warnings_are_left_to_the_cell(transform: Transform, recwarn: pytest.WarningsRecorder) -> None:
    names_of_cell("x = '\\d'\ndef f():\n    return '\\d' is x", transform)
    assert not recwarn.list


def test_globals_of_code() -> None:
    def function(own: int) -> Any:
        global stored

        class Local:
            attribute = class_level  # type: ignore[name-defined]  # noqa: F821  # never called

        def inner() -> Any:
            return own + nested.value  # type: ignore[name-defined]  # noqa: F821  # never called

        stored = [free for _ in range(own)]  # type: ignore[name-defined]  # noqa: F821  # never called
        return inner, Local

    names = globals_of_code(function.__code__)
    assert {"stored", "class_level", "nested", "free", "range"} <= names
    assert not {"own", "value", "inner", "Local", "_"} & names


# ---- every name that a program reads from outside is found


NAMES = st.sampled_from("abcdefg")
# A name that any scope declares global is deleted without asking the namespace's __delitem__: g is, and never deleted.
DELETABLE = st.sampled_from("abcdef")


def _statement_lists(statements: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(statements, min_size=1, max_size=3).map("\n".join)


CLASS_EXPRESSIONS = st.one_of(  # all but a walrus in a comprehension, which Python forbids in a class
    NAMES,
    st.builds("{} + {}".format, NAMES, NAMES),
    st.builds("({} and {})".format, NAMES, NAMES),
    st.builds("(({0} := {1}) and {0})".format, NAMES, NAMES),
    st.builds("({} if {} else {})".format, NAMES, NAMES, NAMES),
    st.builds("({} < ({} := {}) < {})".format, NAMES, NAMES, NAMES, NAMES),
    st.builds("len([{} for {} in range({} % 3)])".format, NAMES, NAMES, NAMES),
    st.builds("(lambda {}: {} + {})({})".format, NAMES, NAMES, NAMES, NAMES),
)
EXPRESSIONS = st.one_of(
    CLASS_EXPRESSIONS, st.builds("sum((g := {0} + g) for _ in range({1} % 3))".format, NAMES, NAMES)
)
SIMPLE = st.one_of(
    st.builds("{} = {}".format, NAMES, EXPRESSIONS),
    st.builds("{} += {}".format, NAMES, EXPRESSIONS),
    st.builds("{0}, {1} = {2}, {2}".format, NAMES, NAMES, NAMES),
    st.builds("del {}".format, DELETABLE),
    st.builds("if {}: raise KeyError".format, NAMES),
    st.builds("def function():\n    global g\n    g = {}\nfunction()".format, EXPRESSIONS),
    st.builds("def function():\n    return {}\n{} = 1\nfunction()".format, EXPRESSIONS, NAMES),
    st.builds("class C:\n    {} = {}\n    {} = {}".format, NAMES, NAMES, NAMES, CLASS_EXPRESSIONS),
)


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = _statement_lists(inner).map(lambda text: textwrap.indent(text, "    "))
    return st.one_of(
        st.builds("if {}:\n{}\nelse:\n{}".format, EXPRESSIONS, block, block),
        st.builds("for {} in range({} % 3):\n{}\nelse:\n{}".format, NAMES, NAMES, block, block),
        st.builds("for _ in range(2):\n{}\n    if {}: break\n{}".format, block, NAMES, block),
        st.builds("while True:\n{}\n    if {}: continue\n{}\n    break".format, block, st.just("0"), block),
        st.builds("try:\n{}\nexcept KeyError as {}:\n{}\nelse:\n{}".format, block, DELETABLE, block, block),
        st.builds("try:\n{}\nfinally:\n{}".format, block, block),
        st.builds("match {}:\n    case {} if {}:\n        pass\n    case 1:\n        pass".format, NAMES, NAMES, NAMES),
        st.builds("with suppress(Exception):\n{}".format, block),
    )


PROGRAMS = _statement_lists(st.recursive(SIMPLE, _compound, max_leaves=12))


class Recording(dict[str, Any]):
    """A global namespace over a notebook: notes each name that is read while the program has not yet set it itself."""

    def __init__(self, notebook: dict[str, int]) -> None:
        super().__init__()
        self.notebook = notebook
        self.gone: set[str] = set()
        self.read: set[str] = set()

    def __missing__(self, name: str) -> Any:
        if name not in self.notebook or name in self.gone:
            raise KeyError(name)
        self.read.add(name)
        return self.notebook[name]

    def __delitem__(self, name: str) -> None:
        self[name]
        self.gone.add(name)
        self.pop(name, None)


@settings(max_examples=200, deadline=None)
@given(program=PROGRAMS, values=st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_whatever_is_read_from_outside_is_found(program: str, values: list[int]) -> None:
    recording = Recording(dict(zip("abcdefg", values, strict=True)))
    setup = {"__builtins__": __builtins__, "__name__": "__main__"}
    recording.update(setup)
    exec("from contextlib import suppress", recording)
    with contextlib.suppress(Exception):  # a deleted name, say: what was read until then counts
        exec(compile(program, "<program>", "exec"), recording)
    found = names_of_cell(program, lambda source: source)
    assert recording.read <= {*found.needed, *found.maybe}
    touched = {name for name in "abcdefg" if name in recording or name in recording.gone}
    assert touched <= found.bound
