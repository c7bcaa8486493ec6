"""Ranks that are kept and the notebook see each other's changes as if they shared one namespace, from cell to cell."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
from unit import test_namespace, test_namespace_memory
from unit.kept import KeptNotebook, KeptRanks, warm_ranks
from unit.test_namespace import Story

from taas_magic.errors import CannotTravelError

STORIES = [*test_namespace.STORIES, *test_namespace_memory.STORIES]


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    with warm_ranks() as ranks:
        yield ranks


@pytest.fixture
def notebook(ranks: KeptRanks) -> Iterator[KeptNotebook]:
    with ranks.notebook() as notebook:
        yield notebook


@pytest.mark.filterwarnings("ignore:Sparse|torch.quantize")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_later_cell_changes_what_the_ranks_had_before(notebook: KeptNotebook, story: Story) -> None:
    notebook.run(textwrap.dedent(story.before))
    # What `alias` holds is what the ranks cannot see.
    names = [name for name in notebook.names if not name.startswith("__") and name != "alias"]
    notebook.cell("pass", *names)
    notebook.cell(textwrap.dedent(story.cell))
    assert notebook.not_home == []
    notebook.run(textwrap.dedent(story.after))


@pytest.mark.filterwarnings("ignore:Sparse|torch.quantize")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_ranks_see_what_the_notebook_changes_of_what_they_made(notebook: KeptNotebook, story: Story) -> None:
    notebook.cell(textwrap.dedent(story.before))
    notebook.run(textwrap.dedent(story.cell))
    notebook.cell(textwrap.dedent(story.after))


def test_each_rank_has_its_own_variables(notebook: KeptNotebook) -> None:
    notebook.cell("import os; own = os.getpid()")
    assert notebook["own"]
    notebook.cell("assert own == os.getpid()")


def test_a_name_that_the_notebook_binds_anew_replaces_what_the_ranks_have(notebook: KeptNotebook) -> None:
    notebook.cell("rate = 0.1")
    notebook.run("rate = 0.2")
    notebook.cell("assert rate == 0.2")
    notebook.run("del rate")
    notebook.cell("assert 'rate' not in globals()")


def test_a_name_that_functions_of_the_ranks_use_is_sent_when_it_is_there(notebook: KeptNotebook) -> None:
    notebook.cell("def scaled(x):\n    return factor * x")
    notebook.run("factor = 3")
    notebook.cell("assert scaled(2) == 6")
    notebook.run("factor = 4")
    notebook.cell("assert scaled(2) == 8")


def test_weights_stay_the_ranks_own_where_the_notebook_changes_something_else(notebook: KeptNotebook) -> None:
    notebook.cell(
        """
import os, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    model.weight.fill_(os.getpid())
"""
    )
    notebook.run("model.eval(); model.note = 'seen'; optimizer.param_groups[0]['lr'] = 0.5")
    notebook.cell(
        """
assert not model.training and model.note == "seen" and optimizer.param_groups[0]["lr"] == 0.5
assert model.weight[0, 0].item() == os.getpid() and optimizer.param_groups[0]["params"][0] is model.weight
"""
    )


def test_weights_that_the_notebook_changes_are_the_same_everywhere(notebook: KeptNotebook) -> None:
    notebook.cell("import torch\nmodel = torch.nn.Linear(2, 2); weight = model.weight")
    notebook.run("import torch\nwith torch.no_grad():\n    model.weight.fill_(7.0)")
    notebook.cell(
        "assert (model.weight == 7).all() and weight is model.weight\nmodel.weight.data = model.weight.data * 2"
    )
    assert notebook["model"].weight.tolist() == [[14.0, 14.0], [14.0, 14.0]]
    # The ranks' weight has other memory now than the notebook knows of.
    notebook.cell("model.weight.data += 1")
    assert notebook["model"].weight.tolist() == [[15.0, 15.0], [15.0, 15.0]]
    notebook.run("model.weight.data += 1")
    notebook.cell("assert (model.weight == 16).all() and (weight == 16).all()")


def test_nothing_travels_where_nothing_changed(notebook: KeptNotebook) -> None:
    notebook.run("import torch; big = torch.zeros(2**20)")
    notebook.cell("total = big.sum()")
    assert notebook.sent_bytes > 2**22
    notebook.cell("total = big.sum() + 1")
    assert notebook.sent_bytes < 20_000
    assert notebook.home_bytes < 20_000


def test_only_the_weights_that_changed_come_home(notebook: KeptNotebook) -> None:
    notebook.cell("import torch; parts = [torch.zeros(2**18) for _ in range(4)]")
    notebook.cell("parts[1] += 1")
    assert 2**20 < notebook.home_bytes < 2**20 + 20_000
    assert [int(part[0]) for part in notebook["parts"]] == [0, 1, 0, 0]
    notebook.cell("parts[2] += 1")
    assert notebook.home_bytes < 2**20 + 20_000
    assert [int(part[0]) for part in notebook["parts"]] == [0, 1, 1, 0]


def test_what_differs_in_kind_is_replaced_when_the_notebook_changes_it(notebook: KeptNotebook) -> None:
    # Which of the two is rank 0 is not to be known here, so both meet at a name that only one has under it.
    notebook.run("first = []")
    notebook.cell("import os; thing = [1] if os.getpid() % 2 else {'a': 1}")
    notebook.run("thing = [*thing, 'changed']; first.append(1)")
    notebook.cell("assert thing[-1] == 'changed' and first == [1]")


def test_push_replaces_and_keeps_what_belongs_together(notebook: KeptNotebook) -> None:
    notebook.cell(
        "import os, torch; model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 0.1)"
    )
    notebook.cell("torch.nn.init.constant_(model.weight, os.getpid())")
    notebook.run("pid = int(model.weight[0, 0])")
    notebook.cell(
        """
assert (model.weight == pid).all() and optimizer.param_groups[0]["params"][0] is model.weight
""",
        anew=frozenset({"model", "optimizer"}),
    )


def test_what_was_changed_and_pushed_is_followed(notebook: KeptNotebook) -> None:
    notebook.run("import torch; t = torch.zeros(10_000)")
    notebook.cell("t += 1")
    notebook.run("t += 1")
    notebook.cell("pass", anew=frozenset({"t"}))
    notebook.cell("t += 1")
    assert notebook["t"][0] == 3
    notebook.run("t += 1")
    notebook.cell("assert t[0] == 4; t += 1")
    assert notebook["t"][0] == 5


def test_a_change_for_each_cell_takes_no_more_each_time(notebook: KeptNotebook) -> None:
    notebook.run("import torch; t = torch.zeros(10_000)")
    notebook.cell("t += 1")
    counts = []
    for _ in range(4):
        notebook.run("t += 1")
        notebook.cell("t += 1")
        counts.append(notebook.num_blocks)
    assert counts[0] == counts[-1]
    assert notebook["t"][0] == 9


def test_what_is_deleted_is_freed(notebook: KeptNotebook) -> None:
    notebook.cell("import torch, weakref; big = torch.zeros(2**20); holder = [big]; gone = weakref.ref(big)")
    notebook.run("import weakref; here = weakref.ref(big)")
    notebook.cell("del big; holder.clear()")
    assert notebook["here"]() is None
    notebook.cell("assert gone() is None")


def test_memory_that_was_sent_is_given_back(notebook: KeptNotebook) -> None:
    notebook.run("import numpy as np; big = np.ones(2**21)")
    notebook.cell("total = big.sum()")
    notebook.run("del big")
    notebook.cell("count = sum('taas-parcel' in line for line in open('/proc/self/maps'))")
    notebook.cell("count = sum('taas-parcel' in line for line in open('/proc/self/maps'))")
    # One file, mapped twice: the parcel of the running cell.
    assert notebook["count"] <= 4


def test_what_the_notebook_forgot_is_sent_again_as_a_value(notebook: KeptNotebook) -> None:
    notebook.cell(
        """
import numpy as np, torch
model = torch.nn.Linear(300, 300); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
array = np.arange(10_000.0); views = [array[5:], array[::2]]
"""
    )
    notebook.run("del model, optimizer, array, views[0]; kept_view = views[0]")
    notebook.cell("assert 'model' not in globals() and len(views) == 1; views[0][0] = -1")
    assert notebook["kept_view"][0] == -1
    notebook.run("del views, kept_view")
    notebook.cell("fresh = np.ones(5)")
    notebook.cell("fresh += 1; again = fresh[1:]")
    assert notebook["again"].tolist() == [2.0] * 4
    notebook.run("fresh += 1")
    assert notebook["again"].tolist() == [3.0] * 4


def test_what_only_the_ranks_still_have_comes_home_anew(notebook: KeptNotebook) -> None:
    notebook.run("import torch; weight = torch.ones(50_000); holder = {'weight': weight}")
    notebook.cell("secret = weakly = None; import gc\nclass Box: pass\nBox.inner = [holder, weight]")
    notebook.run("del Box, holder, weight")
    notebook.cell("Box2 = type('Box2', (), {}); later = torch.zeros(3)")
    notebook.cell("later += 1")
    assert notebook["later"].tolist() == [1, 1, 1]


def test_a_change_that_cannot_be_sent_is_named_and_nothing_is_lost(notebook: KeptNotebook) -> None:
    notebook.cell("settings = {'rate': 1}")
    notebook.run("import os; file = open(os.devnull); settings['log'] = file; settings['rate'] = 2")
    with pytest.raises(CannotTravelError, match=r"`settings\['log'\]` \(an open file") as caught:
        notebook.cell("pass")
    assert "`%taas release`" in str(caught.value)
    notebook.run("del settings['log']; file.close(); del file")
    notebook.cell("assert settings == {'rate': 2}")


def test_what_cannot_be_sent_is_no_longer_there(notebook: KeptNotebook) -> None:
    notebook.cell("x = 1")
    notebook.run("import os; x = open(os.devnull)")
    notebook.cell("assert 'x' not in globals(), 'what it was before is not what the notebook has'")
    notebook.run("x.close(); x = 2")
    notebook.cell("assert x == 2")


def test_memory_that_is_given_another_size_is_no_trouble(notebook: KeptNotebook) -> None:
    notebook.run("import numpy as np, torch; t = torch.ones(10**7); a = np.ones(10**6); alias = t")
    notebook.cell("total = t.sum() + a.sum()")
    notebook.run("t.untyped_storage().resize_(0); a.resize(10, refcheck=False); del t, alias")
    notebook.cell("assert len(a) == 10; a += 1")
    assert notebook["a"].tolist() == [2.0] * 10
    notebook.cell("t = torch.zeros(4)")
    notebook.cell("t += 1; t.untyped_storage().resize_(0); t.untyped_storage().resize_(16); t.fill_(5)")
    notebook.cell("t.fill_(6)")
    assert notebook["t"].tolist() == [6.0] * 4


def test_memory_that_only_the_notebook_moved_is_still_followed_in_the_ranks(notebook: KeptNotebook) -> None:
    notebook.run("import torch; t = torch.zeros(100_000)")
    notebook.cell("t += 1")
    notebook.run("t.data = t.data.clone(); t += 1")
    notebook.cell("pass")
    notebook.cell("t += 1")
    assert notebook["t"][0] == 3
    notebook.cell("t += 1")
    assert notebook["t"][0] == 4


def test_memory_that_the_notebook_moved_is_followed_by_the_very_next_cell(notebook: KeptNotebook) -> None:
    notebook.run("import numpy as np, torch; t = torch.zeros(100_000); a = np.zeros(1000)")
    notebook.cell("t += 1; a += 1")
    notebook.run("t.data = t.data.clone(); a.resize(100_000, refcheck=False)")
    notebook.cell("t += 1; a += 1")
    assert notebook["t"].tolist() == [2.0] * 100_000
    assert (notebook["a"][0], notebook["a"][-1]) == (2.0, 1.0)
    notebook.run("t.untyped_storage().resize_(800_000)")
    notebook.cell("t += 1")
    assert notebook["t"].tolist() == [3.0] * 100_000


def test_functions_that_the_notebook_puts_into_what_ranks_have_find_their_names(notebook: KeptNotebook) -> None:
    notebook.run("hooks = []\nclass A: pass")
    notebook.cell("n = len(hooks); A")
    notebook.run("scale = 3; hooks.append(lambda x: x * scale); factor = 5; A.times = lambda self: factor")
    notebook.cell("assert hooks[0](2) == 6 and A().times() == 5")
    notebook.run("scale = 4; factor = 6")
    notebook.cell("assert hooks[0](2) == 8 and A().times() == 6")


def test_what_one_rank_dropped_is_no_object_of_all(notebook: KeptNotebook) -> None:
    notebook.cell("import os; first = os.getpid(); data = [1, 2]; other = {}")
    notebook.cell("is_0 = first == os.getpid() and False")
    notebook.run("pid = first")
    notebook.cell("if os.getpid() != pid: data = None")
    notebook.cell("if os.getpid() == pid: data.append(5)")
    assert notebook["data"] == [1, 2, 5]


def test_planning_has_no_effect(notebook: KeptNotebook) -> None:
    notebook.cell("settings = {'rate': 1}")
    notebook.run("settings['rate'] = 2; extra = [1]")
    for _ in range(3):
        notebook.plan("settings, extra")
    notebook.cell("assert settings['rate'] == 2 and extra == [1]; settings['rate'] = 3; extra.append(2)")
    assert (notebook["settings"], notebook["extra"]) == ({"rate": 3}, [1, 2])


def test_a_cell_that_fails_leaves_what_it_had_done(notebook: KeptNotebook) -> None:
    notebook.cell("done = [1]")
    notebook.cell("done.append(2); 1 / 0", fails=True)
    assert notebook["done"] == [1, 2]
    notebook.cell("assert done == [1, 2]; done.append(3)")
    assert notebook["done"] == [1, 2, 3]


def test_many_cells(notebook: KeptNotebook) -> None:
    notebook.cell("log = []; table = {}")
    for number in range(20):
        notebook.cell(f"log.append({number}); table[{number}] = [log]; last = table[{number}]")
        notebook.run(f"table[{number}].append({number}); log[-1] += 100")
    notebook.cell("assert log == list(range(100, 120)); assert all(table[n] == [log, n] for n in range(20))")
