"""Data that producers prepare for the ranks of a cell: what comes, in which order, and what the loader stays."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.deliveries import deliver, flat, of_ranks, set_up, started, with_nothing_registered
from process.kernel import Notebook, value


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, private_temp: Path, started_once: None) -> Iterator[Notebook]:
    with started(tmp_path_factory.mktemp("delivery")) as notebook:
        yield notebook


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    with with_nothing_registered(kernel):
        yield kernel


# ---- registering


def test_what_cannot_travel_is_refused_at_once_and_a_second_time_is(notebook: Notebook) -> None:
    notebook.run("train = DataLoader(Numbers(6))\ntrain.dataset._file = open(os.devnull)").ok()
    refused = notebook.run("taas.register(train)")
    assert refused.error_name == "CannotTravelError"
    assert "train.dataset._file" in refused.error_value
    notebook.run("del train.dataset._file\nbefore = dict(vars(train))\ntaas.register(train)").ok()
    assert value(notebook, "type(train) is DataLoader, vars(train) == before, lists(train)[0]") == "(True, True, [0])"
    again = notebook.run("taas.register(train)")
    assert "`train` is registered already" in again.error_value
    assert value(notebook, "taas.registered() == [train], taas.is_registered(train)") == "(True, True)"
    assert (
        value(notebook, "taas.unregister(train), taas.registered(), taas.is_registered(train)") == "(None, [], False)"
    )
    assert notebook.run("taas.unregister(train)").error_name == "RegistrationError"


@pytest.mark.parametrize("path", ["alias", "box['a'][0]", "holder.loader", "give()", "[*box.values()][0][-1]"])
def test_a_loader_is_delivered_through_whatever_the_cell_reaches_it(notebook: Notebook, path: str) -> None:
    notebook.run(
        "train = DataLoader(Where(8), batch_size=2)\nalias, box = train, {'a': [train]}\n"
        "class Holder: pass\nholder = Holder()\nholder.loader = train\ndef give(): return train\n"
        "taas.register(train)"
    ).ok()
    source = f"[len(lists({path})), os.getpid() in sum(lists({path}), []), taas.registered() == [{path}]]"
    assert of_ranks(notebook, source) == [[2, False, True]] * 2
    assert value(notebook, f"{path} is train, type(train) is DataLoader") == "(True, True)"


def test_what_the_cell_does_not_use_is_not_launched(notebook: Notebook) -> None:
    notebook.run("one, other = DataLoader(Where(8)), DataLoader(Where(8))\nlocal = DataLoader(Where(2))").ok()
    notebook.run("taas.register(one)\ntaas.register(other)").ok()
    cell = deliver(notebook, "mine = len(taas.registered()), lists(local)").ok()
    assert "--cpus has nothing to do" in cell.stderr
    assert "preparing" not in cell.stderr
    cell = deliver(notebook, "there = len(taas.registered()), taas.is_registered(one), len(lists(local))").ok()
    assert "one" in cell.stderr
    assert "other" not in cell.stderr
    assert value(notebook, "there, mine[0]") == "((1, True, 2), 0)"


def test_registering_in_a_pragma_cell_is_an_error(notebook: Notebook) -> None:
    notebook.run("train = DataLoader(Numbers(6))").ok()
    for flags in ("--gpus 1", "--gpus 1 --cpus 1"):
        failed = notebook.run(f"#pragma taas {flags}\ntaas.register(train)")
        assert failed.error_name == "RegistrationError"
        assert "expected: taas.register() in a cell without a pragma" in failed.error_value
    assert value(notebook, "taas.registered()") == "[]"


def test_a_data_set_that_shards_itself_asks_which_part_it_is(notebook: Notebook) -> None:
    notebook.run("""
class Own(IterableDataset):
    def __iter__(self):
        part, parts = taas.get_worker_info()
        return iter(range(part, 12, parts))
stream = DataLoader(Own(), batch_size=None, num_workers=3)
taas.register(stream)
""").ok()
    assert value(notebook, "list(Own())") == str(list(range(12)))
    assert of_ranks(notebook, "list(stream)") == [list(range(0, 12, 2)), list(range(1, 12, 2))]


# ---- in the cell


def test_its_parts_answer_as_before(notebook: Notebook) -> None:
    notebook.run("""
names = '''dataset batch_size batch_sampler sampler collate_fn generator drop_last num_workers pin_memory timeout
           worker_init_fn prefetch_factor persistent_workers multiprocessing_context'''.split()
def collate(samples):
    return torch.tensor(samples) * 10
train = DataLoader(Numbers(23), batch_size=3, shuffle=True, collate_fn=collate, drop_last=True,
                   generator=torch.Generator().manual_seed(1))
parts = [getattr(train, name) for name in names]
taas.register(train)
""").ok()
    source = (
        "same = all(getattr(train, name) is part for name, part in zip(names, parts))\n"
        "[same, len(train), len(train.dataset), train.batch_sampler.drop_last, len(lists(train))]"
    )
    assert of_ranks(notebook, source) == [[True, 3, 23, True, 3]] * 2
    assert deliver(notebook, "train.nothing_such").error_name == "AttributeError"


def test_it_is_iterated_as_ever(notebook: Notebook) -> None:
    notebook.run("train = DataLoader(Numbers(24), batch_size=None)\ntaas.register(train)").ok()
    stories = {
        "(list(train), list(train))": lambda all_: (all_, all_),
        "[(a, b) for a in train for b in train]": lambda all_: [(a, b) for a in all_ for b in all_],
        "list(zip(train, train))": lambda all_: list(zip(all_, all_, strict=True)),
        "[next(iter(train)) for _ in range(3)]": lambda all_: all_[:1] * 3,
        "lazily()": lambda all_: (all_[:2], all_, all_[2:], "over"),
        "[list(itertools.islice(train, stop)) for stop in (1, 2, 3, 100)]": lambda all_: [
            all_[:1],
            all_[:2],
            all_[:3],
            all_,
        ],
    }
    source = f"""
def lazily():
    iterator, unused = iter(train), iter(train)
    first = [next(iterator), next(iterator)]
    between = list(train)
    rest = list(iterator)
    return first, between, rest, next(iterator, "over")
[{", ".join(stories)}]
"""
    for rank, told in enumerate(of_ranks(notebook, source)):
        assert told == [story(list(range(rank, 24, 2))) for story in stories.values()]


def test_the_notebooks_own_object_comes_home(notebook: Notebook) -> None:
    notebook.run("train = DataLoader(Where(8), batch_size=2)\nbefore = id(train)\ntaas.register(train)").ok()
    deliver(notebook, "for batch in train:\n    pass\nalias = train\nboxes = {'a': [train]}\npair = train, alias").ok()
    same = "[id(train) == before, alias is train, boxes['a'][0] is train, pair[0] is train, type(train) is DataLoader]"
    assert value(notebook, same) == str([True] * 5)
    assert value(notebook, "sum(lists(train), []) == [os.getpid()] * 8, taas.is_registered(alias)") == "(True, True)"


def test_a_class_of_ones_own_with_methods_and_properties(notebook: Notebook) -> None:
    notebook.run("""
class Own(DataLoader):
    kind = "own"
    def __init__(self, *args, scale, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale
    def __len__(self): return super().__len__()
    @property
    def twice(self): return 2 * self.scale
    def scaled(self, by): return [self.scale * by * number for batch in self for number in batch.tolist()]
    def safe(self): return super().check_worker_number_rationality()
    @classmethod
    def name(cls): return cls.__name__
    @staticmethod
    def add(a, b): return a + b
class Pages:
    def __init__(self, size):
        self.size = size
    def __len__(self): return self.size
    def __iter__(self): yield from range(self.size)
    @property
    def twice(self): return 2 * self.size
    def total(self): return sum(self)
own, pages = Own(Numbers(8), batch_size=2, scale=3), Pages(6)
taas.register(own)
taas.register(pages)
""").ok()
    source = "[own.kind, own.twice, own.scaled(1), own.name(), own.add(1, 2), len(own), own.safe()]"
    assert of_ranks(notebook, source) == [
        ["own", 6, [0, 3, 12, 15], "Own", 3, 2, None],
        ["own", 6, [6, 9, 18, 21], "Own", 3, 2, None],
    ]
    source = "[list(pages), pages.total(), pages.twice, isinstance(pages, Pages)]"
    assert of_ranks(notebook, source) == [[[0, 2, 4], 6, 12, True], [[1, 3, 5], 9, 12, True]]
    assert value(notebook, "type(own) is Own, type(pages) is Pages, list(pages)") == "(True, True, [0, 1, 2, 3, 4, 5])"


def test_the_random_state_moves_as_with_workers_of_a_local_loader(notebook: Notebook) -> None:
    notebook.run("""
numbers = Numbers(10)
def loader(**how): return DataLoader(numbers, num_workers=1, **how)
loaders = [
    loader(),
    loader(shuffle=True, batch_size=4),
    loader(shuffle=True, batch_size=None),
    loader(sampler=WeightedRandomSampler([1.0] * 10, 7)),
    loader(batch_sampler=BatchSampler(RandomSampler(numbers), 3, False)),
    loader(shuffle=True, generator=torch.Generator().manual_seed(1)),
    DataLoader(Parts(4), batch_size=None, num_workers=1),
]
def states(loaders):
    found = []
    for each in loaders:
        torch.manual_seed(7)
        for _ in each:
            pass
        found.append(torch.get_rng_state())
    return found
local = states(loaders)
for each in loaders:
    taas.register(each)
""").ok()
    source = "[torch.equal(a, b) for a, b in zip(states(loaders), local)]"
    assert of_ranks(notebook, source) == [[True] * 7] * 2


# ---- units


def test_units_are_used_up_over_epochs_at_the_same_step(notebook: Notebook) -> None:
    notebook.run("train = DataLoader(Numbers(20), batch_size=2, shuffle=True)\ntaas.register(train)").ok()
    source = "first, again = lists(train), lists(train)\nassert not again\n[len(train), first]"
    cell = deliver(notebook, source, "--units 24 --rank-results").ok()
    assert "--units 24 is 24 elements, 48 samples in batches of 2, 2.4 epochs of 10" in cell.stderr
    assert "`train`: the units are used up: 24 of 24" in cell.stderr
    (length, mine), (other_length, others) = ast.literal_eval(cell.result or "")
    assert length == other_length == len(mine) == len(others) == 12
    rounds = [sorted(mine[step] + others[step]) for step in range(12)]
    epochs = [sorted(flat(rounds[first : first + 5])) for first in (0, 5)]
    assert epochs == [list(range(20))] * 2
    assert rounds[:5] != rounds[5:10]


def test_without_cycles_each_iteration_ends_with_its_epoch(notebook: Notebook) -> None:
    notebook.run("train = DataLoader(Numbers(10), batch_size=None)\ntaas.register(train, cycles=False)").ok()
    cell = deliver(notebook, "[len(train), *(len(list(train)) for _ in range(4))]", "--units 24 --rank-results").ok()
    assert cell.result == "[[5, 5, 5, 2, 0], [5, 5, 5, 2, 0]]"
    assert "the units are used up: 24 of 24" in cell.stderr


def test_what_is_endless_is_bounded_by_units_or_left(notebook: Notebook) -> None:
    notebook.run("endless = Endless()\ntaas.register(endless)").ok()
    assert of_ranks(notebook, "list(endless)", "--units 11") == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert of_ranks(notebook, "list(itertools.islice(endless, 4))") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_elements_say_how_many_units_they_are(notebook: Notebook) -> None:
    notebook.run("""
class Hinted(Numbers):
    def __getitem__(self, index): return {"index": index, "hints": {"units": 3}}
class Page:
    def __init__(self, index):
        self.index, self.hints = index, {"units": index + 1}
class Pages(Numbers):
    def __getitem__(self, index): return Page(index)
hinted = DataLoader(Hinted(4), batch_size=None)
pages = DataLoader(Pages(6), batch_size=None)
taas.register(hinted)
taas.register(pages)
""").ok()
    source = "[[each['index'] for each in hinted], [page.index for page in pages]]"
    cell = deliver(notebook, source, "--units 19 --rank-results")
    # Rounds of (3, 3), four of which would be too much; and of (1, 2), (3, 4), and (5, 6), which would be.
    assert cell.ok().result == "[[[0, 2, 0], [0, 2]], [[1, 3, 1], [1, 3]]]"
    assert "`hinted`: the units are used up: 18 of 19" in cell.stderr
    assert "`pages`: the units are used up: 10 of 19" in cell.stderr


# ---- order


def test_elements_are_dealt_in_turn_and_the_tail_is_dropped_padded_or_split(notebook: Notebook) -> None:
    notebook.run(
        "drops, pads, evals = (DataLoader(Numbers(22), batch_size=4) for _ in range(3))\n"
        "taas.register(drops)\ntaas.register(pads, tail='pad')\ntaas.register(evals, role='eval')\n"
        "epoch = lists(drops)"
    ).ok()
    source = "[lists(drops), lists(pads), lists(evals), lists(evals), [len(drops), len(pads), len(evals)]]"
    cell = deliver(notebook, source, "--rank-results", num_ranks=4).ok()
    assert "`drops`: the last 2 elements of an epoch are dropped" in cell.stderr
    ranks, epoch = ast.literal_eval(cell.result or ""), ast.literal_eval(value(notebook, "epoch"))
    for rank, (dropped, padded, evaluated, again, lengths) in enumerate(ranks):
        assert dropped == [epoch[rank]]
        assert padded == [epoch[rank], [*epoch, *epoch][4 + rank]]
        assert evaluated == again
        assert lengths == [1, 2, 2]
        assert len(evaluated) == 2
    samples = [sample for step in range(2) for rank in ranks for sample in rank[2][step]]
    assert samples == list(range(22))


def test_a_distributed_sampler_says_what_each_rank_sees(notebook: Notebook) -> None:
    notebook.run("""
def loader_of(rank):
    numbers = Numbers(21)
    return DataLoader(numbers, batch_size=3, sampler=DistributedSampler(numbers, 2, rank, seed=4))
def epochs_of(loader):
    found = [lists(loader)]
    for epoch in (0, 1, 5):
        loader.sampler.set_epoch(epoch)
        found.append(lists(loader))
    return [len(loader), found, lists(loader)]
train = loader_of(0)
taas.register(train)
""").ok()
    of_ranks(notebook, "epochs_of(train)")
    assert value(notebook, "_ == [epochs_of(loader_of(rank)) for rank in range(2)]") == "True"
    refused = deliver(notebook, "ran = True\ntrain", num_ranks=3)
    assert refused.error_name == "DeliveryError"
    assert "a DistributedSampler for 2 ranks, and the cell runs on 3" in refused.error_value
    assert value(notebook, "'ran' in globals()") == "False"


# ---- the same, however it is made


def test_contents_and_order_depend_on_the_seed_alone(notebook: Notebook) -> None:
    notebook.run(
        "train = DataLoader(Noisy(23), batch_size=2, shuffle=True)\n"
        "stream = DataLoader(Parts(23), batch_size=None, num_workers=2)\ntaas.register(train)\ntaas.register(stream)"
    ).ok()
    source = "torch.manual_seed(99)\nrandom.seed(99)\nnp.random.seed(99)\n[lists(train), lists(train), lists(stream)]"
    told = []
    for seed, cpus, changes in [(5, 1, {}), (5, 2, {}), (5, 1, {"processes": "3"}), (6, 1, {})]:
        set_up(notebook.directory, **changes)
        notebook.run(f"torch.manual_seed({seed})").ok()
        told.append(of_ranks(notebook, source, cpus=cpus))
    set_up(notebook.directory, transport='"tcp"')
    notebook.run("torch.manual_seed(5)").ok()
    assert of_ranks(notebook, source) == told[0]
    assert told[0] == told[1] == told[2]
    assert told[3] != told[0]
    (first, second, _), (others, _, _) = told[0]
    assert sorted(flat(batch[0] for batch in first + others)) == list(range(23))
    # No random number is there twice: neither in another element, nor in another epoch, nor from another library.
    noise = [drawn for batch in first + others + second for kind in batch[1:] for drawn in kind]
    assert len(set(noise)) == len(noise) == 3 * sum(len(batch[0]) for batch in first + others + second)


@pytest.mark.parametrize("make", ["Noisy(23), batch_size=3, shuffle=True", "Parts(23), batch_size=3"])
def test_exact_is_bit_by_bit_what_a_local_loader_gives(notebook: Notebook, make: str) -> None:
    notebook.run(f"""
def initialise(worker):
    info = torch.utils.data.get_worker_info()
    info.dataset.extra = worker + random.random()
    torch.manual_seed(info.seed % 1000)
def collate(samples):
    info = torch.utils.data.get_worker_info()
    return samples, info.dataset.extra, info.id, float(torch.rand(()))
generator = torch.Generator()
train = DataLoader({make}, num_workers=2, generator=generator, worker_init_fn=initialise, collate_fn=collate)
other = DataLoader({make}, num_workers=2, generator=generator)
def epochs(loader): return [lists(loader), lists(loader)]
local = []
for each in (train, other):
    generator.manual_seed(3)
    local.append(epochs(each))
    taas.register(each, determinism="exact")
generator.manual_seed(3)
""").ok()
    for ranks in (1, 2):
        for number, name in enumerate(("train", "other")):
            of_ranks(notebook, f"epochs({name})", num_ranks=ranks)
            check = f"[dealt(epoch, {ranks}) for epoch in local[{number}]] == [list(each) for each in zip(*_)]"
            assert value(notebook, check) == "True"
            notebook.run("generator.manual_seed(3)").ok()


def test_workers_of_a_stream_are_logical_and_in_the_order_of_a_local_loader(notebook: Notebook) -> None:
    notebook.run(
        "batched, single = (DataLoader(Parts(17), batch_size=size, num_workers=2) for size in (3, None))\n"
        "def told(elements): return [element[:3] for element in elements]\n"
        "local = [told(lists(each)) for each in (batched, single)]\n"
        "taas.register(batched)\ntaas.register(single)"
    ).ok()
    of_ranks(notebook, "[told(lists(each)) for each in (batched, single)]")
    assert value(notebook, "[list(each) for each in zip(*_)] == [dealt(each, 2) for each in local]") == "True"
