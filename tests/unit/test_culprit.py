"""What cannot travel is said with the name, the path to the culprit, its type, and what to do."""

from __future__ import annotations

import pytest
from unit.roundtrip import Notebook

from taas_magic.errors import CannotTravelError
from taas_magic.namespace.pack import diagnose

CASES = [
    ("lock = threading.Lock()", "lock", "lock", "_thread.lock", "create it in the cell"),
    ("table = {'a': [1, {'k': threading.Lock()}]}", "table", "table['a'][1]['k']", "_thread.lock", "create it in"),
    (
        "box = Box(); box.inner = Box(); box.inner._file = open(path)",
        "box",
        "box.inner._file",
        "_io.TextIOWrapper",
        "open",
    ),
    ("pair = (1, (i for i in []))", "pair", "pair[1]", "generator", "make a list"),
    ("db = sqlite3.connect(':memory:')", "db", "db", "sqlite3.Connection", "on first use"),
    ("def f(x=threading.Lock()): pass", "f", "f (default 0)", "_thread.lock", "create it in the cell"),
    ("def f(*, x=threading.Lock()): pass", "f", "f (default 'x')", "_thread.lock", "create it in the cell"),
    (
        "def outer(l):\n    def f(): return l\n    return f\nf = outer(threading.Lock())",
        "f",
        "f (its variable 'l')",
        "_thread.lock",
        "",
    ),
    ("slotted = Slotted(); slotted.part = threading.Lock()", "slotted", "slotted.part", "_thread.lock", "__getstate__"),
    (
        "box = Box(); box.lock = threading.Lock(); method = box.hello",
        "method",
        "method.__self__.lock",
        "_thread.lock",
        "",
    ),
    ("loop = [1]; loop.append(loop); loop.append(threading.Lock())", "loop", "loop[2]", "_thread.lock", ""),
    (
        "import socket; box = Box(); box.conn = socket.socket(); box.conn.close()",
        "box",
        "box.conn",
        "socket.socket",
        "first use",
    ),
]

SETUP = """
import sqlite3, threading
class Box:
    def hello(self): pass
class Slotted: __slots__ = ("part",)
"""


@pytest.fixture
def prepared(notebook: Notebook, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("x")
    notebook.names["path"] = str(path)
    notebook.run(SETUP)
    yield notebook
    for name in ("box", "db"):
        thing = notebook.names.get(name)
        for part in (thing, getattr(getattr(thing, "inner", None), "_file", None)):
            close = getattr(part, "close", None)
            if close is not None:
                close()


@pytest.mark.parametrize("case", CASES, ids=[case[2] for case in CASES])
def test_the_error_leads_to_the_culprit(prepared, case: tuple[str, str, str, str, str]) -> None:
    source, name, path, type_name, advice = case
    prepared.run(source)
    culprit = diagnose(prepared.names, name, prepared.names[name])
    assert culprit is not None
    assert (culprit.path, culprit.type_name) == (path, type_name)
    assert advice in culprit.advice
    with pytest.raises(CannotTravelError) as caught:
        prepared.pack(f"print({name})")
    assert f"{path} is a {type_name}" in str(caught.value)
    assert culprit.advice in str(caught.value)


def test_what_can_travel_has_no_culprit(prepared) -> None:
    prepared.run("fine = {'a': [Box()], 'f': lambda: fine}")
    assert diagnose(prepared.names, "fine", prepared.names["fine"]) is None


def test_the_error_says_through_which_names_the_cell_reaches_it(prepared) -> None:
    prepared.run("lock = threading.Lock()\ndef inner(): return lock\ndef outer(): return inner()")
    with pytest.raises(CannotTravelError, match=r"`lock` \(used by outer, then inner\) cannot be sent"):
        prepared.pack("outer()")


def test_a_file_is_refused_though_its_text_could_be_sent(prepared) -> None:
    prepared.run("box = Box(); box.inner = Box(); box.inner._file = open(path)")
    with pytest.raises(CannotTravelError, match="belongs to the process that opened it"):
        prepared.pack("box")
