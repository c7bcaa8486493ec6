"""Delivered data: what goes wrong, elements of all kinds, streams that are taken up again, and several loaders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.deliveries import SOON_S, deliver, flat, of_deliveries, of_ranks, set_up, started, with_nothing_registered
from process.kernel import Notebook, value
from process.watch import await_condition, titled


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, private_temp: Path, started_once: None) -> Iterator[Notebook]:
    with started(tmp_path_factory.mktemp("delivery")) as notebook:
        yield notebook


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    with with_nothing_registered(kernel):
        yield kernel


# ---- what can go wrong


BREAKING = """
class BrokenError(ValueError):
    def __init__(self, text, index):
        super().__init__(text)
        self.index = index
class Breaking(Numbers):
    def __init__(self, size, *bad):
        self.size, self.bad = size, bad
    def __getitem__(self, index):
        if index in self.bad: raise BrokenError("bad pixel", index)
        return index
train = DataLoader(Breaking(10, 3, 6), batch_size=None)
def survivors(loader):
    found, iterator = [], iter(loader)
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except BrokenError as error:
            found.append(["broken", error.index, str(error)])
        except PoisonElementError as error:
            found.append(["poison", str(error)])
"""


def test_an_exception_is_raised_where_the_element_was_to_go(notebook: Notebook) -> None:
    notebook.run(BREAKING + "taas.register(train)").ok()
    told = of_ranks(notebook, "survivors(train)")
    assert told == [[0, 2, 4, ["broken", 6, "bad pixel"], 8], [1, ["broken", 3, "bad pixel"], 5, 7, 9]]
    notebook.run("train.dataset.bad = [3]").ok()
    failed = deliver(notebook, "for number in train:\n    pass")
    assert (failed.error_name, failed.error_value) == ("BrokenError", "bad pixel")
    assert "[rank 1] of 2 failed" in failed.traceback_text
    assert "in a producer of `train`, for element 3 of epoch 0, made of 3" in failed.traceback_text
    assert 'raise BrokenError("bad pixel", index)' in failed.traceback_text
    notebook.run("batched = DataLoader(Breaking(10, 3), batch_size=4)\ntaas.register(batched)").ok()
    failed = deliver(notebook, "list(batched)")
    assert "for element 0 of epoch 0, made of [0, 1, 2, 3]" in failed.traceback_text


def test_an_exception_that_would_end_the_loop_is_no_end(notebook: Notebook) -> None:
    notebook.run(
        BREAKING.replace('raise BrokenError("bad pixel", index)', "raise StopIteration") + "taas.register(train)"
    )
    failed = deliver(notebook, "for number in train:\n    pass")
    assert (failed.error_name, failed.error_value) == ("RuntimeError", "the data set raised StopIteration")


def test_a_sampler_that_raises_does_so_on_every_rank_behind_what_it_has_said(notebook: Notebook) -> None:
    short = """
class Short(torch.utils.data.Sampler):
    def __len__(self): return 10
    def __iter__(self):
        yield from range(5)
        raise BrokenError("no more", 5)
short = DataLoader(Numbers(10), batch_size=None, sampler=Short())
taas.register(short)
"""
    notebook.run(BREAKING + short).ok()
    assert of_ranks(notebook, "survivors(short)") == [
        [0, 2, 4, ["broken", 5, "no more"]],
        [1, 3, ["broken", 5, "no more"], ["broken", 5, "no more"]],
    ]
    failed = deliver(notebook, "list(short)")
    assert (failed.error_name, failed.error_value) == ("BrokenError", "no more")
    assert "in the sampler of `short`, for epoch 0" in failed.traceback_text
    assert 'raise BrokenError("no more", 5)' in failed.traceback_text
    assert "data/planner.py" not in failed.traceback_text


def test_what_cannot_be_made_is_skipped_where_that_is_wanted(notebook: Notebook) -> None:
    notebook.run(BREAKING + "taas.register(train, on_error='skip')").ok()
    cell = deliver(notebook, "[list(train), len(list(train))]", "--rank-results").ok()
    assert cell.result == "[[[0, 2, 5, 8], 4], [[1, 4, 7, 9], 4]]"
    assert "`train`: element 3 of epoch 0 is skipped: bad pixel" in cell.stderr
    assert "`train`: 4 elements could not be made and were skipped" in cell.stderr
    # A third epoch is prepared, which nobody wants.
    assert "epoch 2" not in cell.stderr


@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_an_element_that_ends_its_producers_is_named(notebook: Notebook, end: str) -> None:
    notebook.run(BREAKING.replace('raise BrokenError("bad pixel", index)', end) + "taas.register(train)").ok()
    first, second = of_ranks(notebook, "survivors(train)")
    assert [each for each in first if isinstance(each, int)] == [0, 2, 4, 8]
    assert [each for each in second if isinstance(each, int)] == [1, 5, 7, 9]
    assert first[3][0] == second[1][0] == "poison"
    assert "element 6 of epoch 0 of `train` ended 3 producers" in first[3][1]
    assert "element 3 of epoch 0 of `train` ended 3 producers" in second[1][1]


def test_the_ranks_start_when_data_is_prepared(notebook: Notebook) -> None:
    notebook.run(
        "class Made(Numbers):\n    def __getitem__(self, index):\n        return time.monotonic()\n"
        "train = DataLoader(Made(20), batch_size=None)\ntaas.register(train)"
    ).ok()
    set_up(notebook.directory, prepare_s="600.0")
    cell = deliver(notebook, "started = time.monotonic()\nlate = [made for made in train if made > started]").ok()
    assert "preparing data" in cell.stderr
    assert "100 %: train 20 ready" in cell.stderr
    assert value(notebook, "late") == "[]"


def test_the_preparation_can_be_interrupted(notebook: Notebook) -> None:
    notebook.run(
        "class Stuck(Numbers):\n    def __getitem__(self, index):\n        time.sleep(3600)\n"
        "stuck = DataLoader(Stuck(20), batch_size=None)\ntaas.register(stuck)\n"
        "train = DataLoader(Numbers(4), batch_size=None)\ntaas.register(train)"
    ).ok()
    set_up(notebook.directory, prepare_s="600.0")
    notebook.start("#pragma taas --gpus 2 --cpus 1\nran = True\nlist(stuck)")
    notebook.wait_for_output("preparing data")
    await_condition(lambda: bool(titled(notebook.pid, "taas: producer")), "a producer", SOON_S)
    notebook.interrupt()
    assert notebook.wait().error_name == "KeyboardInterrupt"
    await_condition(lambda: not of_deliveries(notebook), "the end of the producers", SOON_S)
    assert value(notebook, "'ran' in globals()") == "False"
    assert of_ranks(notebook, "list(train)") == [[0, 2], [1, 3]]


# ---- any object


def test_elements_may_be_anything(notebook: Notebook) -> None:
    notebook.run("""
Pair = collections.namedtuple("Pair", "left right")
@dataclasses.dataclass
class Sample:
    image: object
    label: int
class Record:
    def __init__(self, **parts):
        vars(self).update(parts)
    def __eq__(self, other): return type(other) is Record and same(vars(self), vars(other))
def same(a, b):
    if type(a) is not type(b): return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, np.ndarray): return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    if dataclasses.is_dataclass(a): return same(vars(a), vars(b))
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b
def things():
    big = torch.arange(60_000.0).view(200, 300)
    found = [
        None, "text", b"bytes", 3, {"a": [1, (2, {"b": None})]}, Pair(torch.ones(2), "right"),
        Sample(big.t(), 4), Record(numbers=np.arange(5), more=[Record(x=1)]), torch.eye(3).to_sparse(),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), np.array([None, "x"], dtype=object),
        np.arange(60_000)[::-3], torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(1 + 2j), torch.empty(0, 4), torch.tensor(5), big[::2, 5:], Record, same, range(4)]
    if importlib.util.find_spec("PIL"):
        from PIL import Image
        found.append(Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)))
    return found
class Zoo(Dataset):
    def __len__(self): return len(things())
    def __getitem__(self, index): return things()[index]
def wrong(got):
    return [index for index, pair in enumerate(zip(got, things(), strict=True)) if not same(*pair)]
zoo = DataLoader(Zoo(), batch_size=None, collate_fn=lambda thing: thing)
taas.register(zoo)
""").ok()
    assert deliver(notebook, "got = list(zoo)\nwrong(got)", num_ranks=1).ok().result == "[]"
    assert value(notebook, "wrong(got)") == "[]"


def test_elements_that_are_kept_stay_what_they_are(notebook: Notebook) -> None:
    notebook.run(
        "class Large(Numbers):\n    def __getitem__(self, index):\n        return torch.full((50_000,), index)\n"
        "large = DataLoader(Large(60), batch_size=None)\ntaas.register(large)"
    ).ok()
    set_up(notebook.directory, memory_mib="4")
    source = """
kept = []
for epoch in range(2):
    for tensor in large:
        tensor[:1000] += 100
        kept.append(tensor)
first = list(range(taas.rank(), 60, 2))
want = [torch.full((50_000,), number) for number in first * 2]
for tensor in want:
    tensor[:1000] += 100
[len(kept), all(map(torch.equal, kept, want))]
"""
    assert of_ranks(notebook, source) == [[60, True]] * 2
    assert value(notebook, "[tensor[-1].item() for tensor in kept] == first * 2") == "True"


# ---- to be continued


def test_a_stream_is_resumed_with_other_ranks_without_loss_or_repetition(notebook: Notebook) -> None:
    notebook.run(
        "train = DataLoader(Noisy(60), batch_size=None, shuffle=True)\ntaas.register(train)\ntorch.manual_seed(2)"
    ).ok()
    whole = of_ranks(notebook, "[lists(train), lists(train)]", num_ranks=1)[0]
    notebook.run("torch.manual_seed(2)").ok()
    source = "found = lists(train) + list(itertools.islice(train, 6))\nstate = train.state_dict()\nfound"
    before = of_ranks(notebook, source)
    assert before == [whole[0][rank::2] + whole[1][rank:12:2] for rank in range(2)]
    notebook.run("taas.unregister(train)\ntaas.register(train, resume=state)").ok()
    then = of_ranks(notebook, "[lists(train), len(lists(train))]", num_ranks=3)
    assert [then[place % 3][0][place // 3] for place in range(48)] == whole[1][12:]
    assert [rank[1] for rank in then] == [20] * 3
    # The same in a cell, and from the very beginning.
    source = "train.load_state_dict(state)\nrest = lists(train)\ntrain.load_state_dict(state)\n[rest, lists(train)]"
    notebook.run("taas.unregister(train)\ntaas.register(train)").ok()
    assert of_ranks(notebook, source, num_ranks=1) == [[whole[1][12:], whole[1][12:]]]
    refused = deliver(notebook, "train.load_state_dict({'epoch': 3})")
    assert refused.error_name == "ValueError"


def test_a_stream_of_workers_is_resumed_as_well(notebook: Notebook) -> None:
    notebook.run(
        "stream = DataLoader(Parts(31), batch_size=None, num_workers=2)\ntaas.register(stream)\ntorch.manual_seed(4)"
    ).ok()
    whole = of_ranks(notebook, "lists(stream)", num_ranks=1)[0]
    notebook.run("torch.manual_seed(4)").ok()
    before = of_ranks(notebook, "got = lists(itertools.islice(stream, 5))\nstate = stream.state_dict()\ngot")
    assert [before[place % 2][place // 2] for place in range(10)] == whole[:10]
    notebook.run("taas.unregister(stream)\ntaas.register(stream, resume=state)").ok()
    assert of_ranks(notebook, "lists(stream)", num_ranks=1)[0] == whole[10:]


# ---- several loaders, several cells


def test_training_and_validation_take_turns(notebook: Notebook) -> None:
    notebook.run(
        "train = DataLoader(Numbers(12), batch_size=2)\nvalid = DataLoader(Numbers(9), batch_size=2)\n"
        "taas.register(train)\ntaas.register(valid, role='eval')"
    ).ok()
    source = "[[[sum(batch) for batch in lists(train)], lists(valid)] for epoch in range(3)]"
    first, second = of_ranks(notebook, source, "--units 14")
    assert first[0][0] == [1, 9, 17, 1, 9, 17, 1]
    assert second[0][0] == [5, 13, 21, 5, 13, 21, 5]
    assert first[1][0] == second[2][0] == []
    for mine, others in zip(first, second, strict=True):
        assert len(mine[1]) == len(others[1]) == 3
        assert sorted(flat(mine[1] + others[1])) == list(range(9))


def test_two_loaders_in_step_are_not_shuffled_alike(notebook: Notebook) -> None:
    notebook.run(
        "real, fake = (DataLoader(Noisy(40), batch_size=None, shuffle=True) for _ in range(2))\n"
        "taas.register(real)\ntaas.register(fake)"
    ).ok()
    for rank in of_ranks(notebook, "[[list(a), list(b)] for a, b in zip(real, fake, strict=True)]"):
        assert [a[0] for a, _ in rank] != [b[0] for _, b in rank]
        assert not {a[1] for a, _ in rank} & {b[1] for _, b in rank}


def test_kept_ranks_and_a_later_cell_without_producers(notebook: Notebook) -> None:
    notebook.run(
        "train, other = DataLoader(Where(8)), DataLoader(Where(4))\nfor each in (train, other): taas.register(each)"
    ).ok()
    source = "pids = sum(lists(train), [])\n[len(pids), os.getpid() in pids, taas.registered() == [train]]"
    try:
        assert of_ranks(notebook, source, "--keep") == [[4, False, True]] * 2
        assert of_ranks(notebook, source) == [[4, False, True]] * 2
        assert of_ranks(notebook, "[len(lists(other)), taas.registered() == [other]]") == [[2, True]] * 2
        local = "[type(train) is DataLoader, sum(lists(train), []) == [os.getpid()] * 8, taas.registered()]"
        later = notebook.run(f"#pragma taas --gpus 2 --rank-results\n{local}")
        assert later.ok().result == str([[True, True, []]] * 2)
    finally:
        notebook.run("%taas release").ok()
    await_condition(lambda: not titled(notebook.pid, "taas: rank"), "the end of the ranks", SOON_S)


def test_of_the_memory_kept_ranks_keep_what_they_use(notebook: Notebook) -> None:
    notebook.run(
        "class Blocks(Numbers):\n"
        "    def __getitem__(self, index):\n        return torch.full((1_000_000,), float(index))\n"
        "blocks = DataLoader(Blocks(16), batch_size=None)\ntaas.register(blocks)"
    ).ok()
    set_up(notebook.directory, prepare_mib="64")
    memory = (
        "sum(os.stat(f'/proc/self/map_files/{line.split()[0]}').st_blocks * 512 "
        "for line in open('/proc/self/maps') if 'taas elements' in line)"
    )
    try:
        source = "held = [block for block in blocks if block[0] in (2, 3, 8)]\nlen(held)"
        assert sum(of_ranks(notebook, source, "--keep")) == 3
        used = notebook.run(f"#pragma taas --gpus 2 --rank-results\n[[block[5].item() for block in held], {memory}]")
        held, after = zip(*ast.literal_eval(used.ok().result or ""), strict=True)
        assert held == ([2.0, 8.0], [3.0])
        # Both ranks map the same memory, of which the three elements are left, and what was handed out last.
        assert all(12_000_000 <= size < 24_000_000 for size in after), after
    finally:
        notebook.run("%taas release").ok()
