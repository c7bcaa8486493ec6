"""As test_namespace, for what surprised somebody once: changes that were lost, reverted, or reached too far."""

from __future__ import annotations

import pytest
from unit.roundtrip import Notebook
from unit.test_namespace import Story

STORIES = [
    Story(
        "attributes beside one that only its pickle shows the change of",
        """
        import numpy as np
        class Holder:
            def __init__(self): self.x = 1; self.rng = np.random.default_rng(0)
        holder = Holder(); before = holder.rng.bit_generator.state["state"]["state"]; alias = holder
        def marked(): pass
        marked.x = 1; marked.rng = np.random.default_rng(0)
        """,
        "holder.x = 5; holder.y = 6; holder.rng.random(); marked.x = 5; marked.rng.random()",
        """
        assert alias is holder and (holder.x, holder.y, marked.x) == (5, 6, 5)
        assert holder.rng.bit_generator.state["state"]["state"] != before
        """,
    ),
    Story(
        "a frame changes without the frames that share its columns",
        """
        import pandas as pd
        frame = pd.DataFrame({"a": [1, 2, 3], "b": [1.0, 2.0, 3.0], "s": ["x", "y", "z"]})
        renamed, column, shallow = frame.rename(columns={"a": "z"}), frame["b"], frame.copy(deep=False)
        alias = renamed, column, shallow
        """,
        "frame.loc[0, 'a'] = 77; frame.loc[0, 'b'] = 88; frame.loc[0, 's'] = 'q'",
        """
        assert frame.loc[0].tolist() == [77, 88.0, "q"]
        assert renamed["z"].tolist() == [1, 2, 3] and column.tolist() == [1, 2, 3]
        assert shallow["s"].tolist() == ["x", "y", "z"] and shallow["a"].tolist() == [1, 2, 3]
        """,
    ),
    Story(
        "two tensors exchange their data",
        "import torch; one, other = torch.zeros(3), torch.ones(3); alias = one, other",
        "one.data, other.data = other.data, one.data",
        "assert alias[0] is one and one.tolist() == [1, 1, 1] and other.tolist() == [0, 0, 0]",
    ),
    Story(
        "memory that overlaps in part is one memory",
        """
        import numpy as np, torch
        array = np.zeros(10); low, high = torch.from_numpy(array[:5]), torch.from_numpy(array[2:]); seen = []
        """,
        "array[3] = 100; low[0] = 5; high[6] = 7; seen.append((low[3].item(), high[1].item()))",
        """
        assert seen == [(100, 100)] and array.tolist() == [5, 0, 0, 100, 0, 0, 0, 0, 7, 0]
        assert low[3] == high[1] == 100
        """,
    ),
    Story(
        "a storage that is part of an array's memory",
        """
        import numpy as np, torch
        array = np.arange(64, dtype=np.uint8); storage = torch.from_numpy(array[16:48]).untyped_storage()
        """,
        "seen = storage.nbytes(), storage[0]; array[17] = 99; same = storage[1]; storage[2] = 77",
        "assert seen == (32, 16) and same == 99 and array[17] == storage[1] == 99 and array[18] == storage[2] == 77",
    ),
    Story(
        "an instance of another class now",
        "class A: pass\nclass B(A):\n    def name(self): return 'B'\nthing = A(); alias = thing",
        "thing.__class__ = B; thing.q = 1",
        "assert alias is thing and type(thing) is B and thing.q == 1 and thing.name() == 'B'",
    ),
    Story(
        "an array made writable again",
        "import numpy as np\narray = np.arange(4); array.flags.writeable = False; alias = array",
        "array.flags.writeable = True; array[0] = 9",
        "assert array[0] == 9",
    ),
    Story(
        "a cached function, a new type, a cached property",
        """
        import functools, typing
        @functools.lru_cache
        def plus_one(x): return x + 1
        UserId = typing.NewType("UserId", int); P = typing.ParamSpec("P")
        class Lazy:
            @functools.cached_property
            def value(self): return 3
        lazy = Lazy()
        """,
        "total = plus_one(2) + UserId(1) + lazy.value; spec = P.__name__",
        "assert total == 7 and spec == 'P' and vars(lazy) == {'value': 3}",
    ),
]


@pytest.mark.parametrize("where", ["in the notebook", "elsewhere"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_cell_does_what_it_would_have_done_here(notebook: Notebook, story: Story, where: str) -> None:
    story.tell(notebook, where)


def test_one_object_that_cannot_say_its_state_stays_alone(notebook: Notebook) -> None:
    notebook.run(
        "class Door:\n"
        "    def __init__(self): self.a = 1; self.is_open = False\n"
        "    def __getstate__(self):\n"
        "        if self.is_open: raise RuntimeError('is open')\n"
        "        return dict(self.__dict__)\n"
        "    def __setstate__(self, state): self.__dict__.update(state)\n"
        "door, history = Door(), []"
    )
    trip = notebook.cell("door.is_open = True; door.a = 2; history.append(1); other = 3")
    assert notebook["history"] == [1]
    assert notebook["other"] == 3
    assert any("door" in path and "is open" in reason for path, reason in trip.not_home.items()), trip.not_home


def test_a_value_that_cannot_come_leaves_the_old_one_under_its_key(notebook: Notebook) -> None:
    notebook.run("import threading\nhistory = {'a': 1, 'b': 2}; alias = history")
    trip = notebook.cell("history['a'] = threading.Lock(); history['b'] = 3; history['c'] = threading.Lock()")
    assert notebook["alias"] == {"a": 1, "b": 3}
    assert set(trip.not_home) == {"history['a']", "history['c']"}


def test_a_view_made_by_the_cell_keeps_its_array_alive(notebook: Notebook) -> None:
    notebook.run("import numpy as np, sys, torch\narray = np.arange(1000.0); references = sys.getrefcount(array)")
    notebook.cell("view = array[:5]; tensor = torch.from_numpy(array)[:5]")
    notebook.run("assert sys.getrefcount(array) > references; del array; total = float(view.sum() + tensor.sum())")
    assert notebook["total"] == 20
