"""Which loaders the notebook has registered, and what is refused at once."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import taas
from taas import _place
from taas_magic.data import describe, registry, stand_in
from taas_magic.errors import CannotTravelError, RegistrationError
from taas_magic.wire_data import LoaderTask, Position


class Stream:
    """An iterable of a class of the user's."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Slotted(Stream):
    __slots__ = ()


class Whole:
    """Knows nothing of weak references."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Indexed:
    """The old way to be iterated."""

    def __getitem__(self, index: int) -> int:
        if index > 3:
            raise IndexError(index)
        return index


class Sharded(IterableDataset[tuple[int, int]]):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = taas.get_worker_info()
        yield info.id, info.num_workers


class WithFile(Dataset[int]):
    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def __getitem__(self, index: int) -> int:
        return index


def loader_of_three() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(3)))


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    assert taas.registered() == []
    yield
    for loader in taas.registered():
        taas.unregister(loader)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The notebook's names."""
    monkeypatch.setattr(sys.modules["__main__"], "train", None, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "valid", None, raising=False)
    return sys.modules["__main__"].__dict__


@pytest.mark.parametrize("make", [loader_of_three, Stream, Slotted, Whole, Indexed])
def test_registering_leaves_the_loader_as_it_is(make: Any) -> None:
    loader = make()
    kind, parts = type(loader), dict(getattr(loader, "__dict__", {}))
    assert not taas.is_registered(loader)
    taas.register(loader)
    assert taas.is_registered(loader)
    assert type(loader) is kind
    assert getattr(loader, "__dict__", {}) == parts
    assert len(list(loader)) >= 3
    taas.unregister(loader)
    assert not taas.is_registered(loader)
    assert type(loader) is kind


def test_they_are_listed_in_order() -> None:
    loaders: list[Any] = [loader_of_three(), Stream(), loader_of_three()]
    for loader in loaders:
        taas.register(loader)
    assert all(one is other for one, other in zip(taas.registered(), loaders, strict=True))
    assert not taas.is_registered(copy.copy(loaders[1]))
    taas.unregister(loaders[0])
    taas.register(loaders[0])
    assert [taas.registered().index(loader) for loader in loaders] == [2, 0, 1]


def test_a_second_registration_is_refused_and_changes_nothing(main: dict[str, Any]) -> None:
    main["train"] = loader_of_three()
    taas.register(main["train"], tail="pad")
    with pytest.raises(ValueError, match=r"(?s)`train` is registered already.*to do: taas.unregister\(train\)"):
        taas.register(main["train"])
    assert registry.registrations()[0].tail == "pad"


def test_what_is_not_registered_cannot_be_taken_back(main: dict[str, Any]) -> None:
    main["train"], main["valid"] = loader_of_three(), loader_of_three()
    taas.register(main["train"])
    with pytest.raises(ValueError, match=r"(?s)`valid` is not registered.*`train`") as raised:
        taas.unregister(main["valid"])
    assert isinstance(raised.value, RegistrationError)
    taas.unregister(main["train"])
    with pytest.raises(ValueError, match=r"(?s)`train` is not registered.*none"):
        taas.unregister(main["train"])


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("role", "role='train' or role='eval'"),
        ("tail", "tail='drop' or tail='pad'"),
        ("on_error", "on_error='raise' or on_error='skip'"),
        ("determinism", "determinism='seeded' or determinism='exact'"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_right_ones(key: str, choices: str) -> None:
    loader: Any = loader_of_three()
    wrong: dict[str, Any] = {key: "perhaps"}
    with pytest.raises(ValueError, match=choices):
        taas.register(loader, **wrong)
    assert not taas.is_registered(loader)


def test_what_cannot_travel_is_named_with_the_path_to_it(main: dict[str, Any], tmp_path: Path) -> None:
    dataset = WithFile(tmp_path / "data")
    main["train"] = DataLoader(dataset)
    with pytest.raises(TypeError, match=r"train\.dataset\._file") as raised:
        taas.register(main["train"])
    assert isinstance(raised.value, CannotTravelError)
    assert not taas.is_registered(main["train"])
    dataset._file.close()
    collate: Any = threading.Lock().acquire
    main["train"] = DataLoader(TensorDataset(torch.arange(3)), collate_fn=collate)
    with pytest.raises(TypeError, match=r"train\.collate_fn"):
        taas.register(main["train"])


@pytest.mark.parametrize("what", [3, None, object(), len], ids=repr)
def test_what_cannot_be_iterated_is_refused(what: Any) -> None:
    with pytest.raises(ValueError, match="cannot be iterated"):
        taas.register(what)


@pytest.mark.parametrize("make", [lambda: [1, 2], lambda: {1: 2}, lambda: range(3), lambda: torch.ones(3).numpy()])
def test_what_needs_no_preparation_is_refused_with_advice(make: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)nothing to prepare.*to do: make a DataLoader of it"):
        taas.register(make())
    assert taas.registered() == []


def test_a_generator_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        taas.register(number for number in range(3))


def test_a_loader_that_is_gone_is_not_registered() -> None:
    loader, stream, whole = loader_of_three(), Stream(), Whole()
    for each in (loader, stream, whole):
        taas.register(each)
    del loader, stream, each
    gc.collect()
    # What knows of no weak references stays.
    assert [type(each) for each in taas.registered()] == [Whole]
    del whole
    gc.collect()
    assert len(taas.registered()) == 1
    taas.register(loader_of_three())
    assert len(taas.registered()) == 1, "nobody else has it"


def test_a_registration_is_not_pickled_with_the_loader() -> None:
    loader = loader_of_three()
    taas.register(loader)
    again = pickle.loads(pickle.dumps(loader))
    assert not taas.is_registered(again)
    assert not taas.is_registered(copy.deepcopy(loader))


def test_a_name_is_the_notebooks_or_the_one_that_is_given(main: dict[str, Any]) -> None:
    main["train"] = loader_of_three()
    unnamed, named = Stream(), Stream()
    taas.register(main["train"])
    taas.register(unnamed)
    taas.register(named, name="pairs")
    assert [each.name for each in registry.registrations()] == ["train", "Stream", "pairs"]


def test_on_a_rank_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of_three()
    monkeypatch.setattr(_place, "current", _place.Place(0, 2, 0, is_in_run=True))
    for change in (taas.register, taas.unregister):
        with pytest.raises(ValueError, match="in a cell that runs on ranks"):
            change(loader)
    assert taas.registered() == []
    assert not taas.is_registered(loader)


def test_a_state_says_where_to_begin() -> None:
    loader = loader_of_three()
    state = {"version": 1, "seed": 5, "epoch": 2, "element": 1, "units": 7}
    taas.register(loader, resume=state)
    assert registry.registrations()[0].start == Position(5, 2, 1, 7)
    other = loader_of_three()
    taas.register(other, resume={"version": 1})
    assert registry.registrations()[1].start is None


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 2},
        {"version": 1, "seed": 5},
        {"version": 1, "seed": 1, "epoch": -1, "element": 0, "units": 0},
        3,
    ],
    ids=repr,
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    loader = loader_of_three()
    with pytest.raises(ValueError, match="state of a delivered loader"):
        taas.register(loader, resume=state)
    assert not taas.is_registered(loader)


def test_a_data_set_is_told_which_part_it_is() -> None:
    assert taas.get_worker_info() == (0, 1)
    info = taas.get_worker_info()
    assert (info.id, info.num_workers) == (0, 1)
    assert [tuple(map(int, part)) for part in DataLoader(Sharded(), batch_size=None)] == [(0, 1)]
    parts = DataLoader(Sharded(), batch_size=None, num_workers=2)
    assert sorted(tuple(map(int, part)) for part in parts) == [(0, 2), (1, 2)]


# ---- what kind of loader it is


class Own(DataLoader[Any]):
    """Iterates as torch's own does."""

    @property
    def double(self) -> int:
        return 2 * len(self)


class Different(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1, 2])


def test_a_loader_that_iterates_in_its_own_way_is_not_taken_apart() -> None:
    dataset = TensorDataset(torch.arange(3))
    assert describe.is_data_loader(Own(dataset))
    assert not describe.is_data_loader(Different(dataset))
    assert not describe.is_data_loader(Stream())
    assert describe.num_shards(Different(dataset), is_exact=False) == 1
    assert describe.num_shards(Own(dataset, num_workers=2), is_exact=False) == 0
    assert describe.num_shards(Own(dataset, num_workers=2), is_exact=True) == 2
    assert describe.num_shards(DataLoader(Sharded(), num_workers=0), is_exact=False) == 1


class Reduced(Own):
    """Says itself what a copy of it is made of."""

    def __reduce__(self) -> Any:
        return self.__class__, (self.dataset, self.batch_size)


class Elaborate(Own):
    """Has in its class what only works with an object of that class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0

    def __len__(self) -> int:
        return super().__len__()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "calls": -1}

    def __contains__(self, value: object) -> bool:
        return super().double == value

    def note(self) -> int:
        assert isinstance(self, Elaborate)
        self.calls += 1
        return super().double + self.calls

    @property
    def factor(self) -> int:
        return self.calls * 10

    @factor.setter
    def factor(self, value: int) -> None:
        self.calls = value // 10


@contextlib.contextmanager
def delivered(loader: Any) -> Iterator[Any]:
    connection: Any = types.SimpleNamespace(close=lambda: None)
    task = LoaderTask(7, "loader", "loader")
    stand_in.attach(connection, [task], {7: loader}, 1)
    try:
        yield loader
    finally:
        stand_in.detach()


@pytest.mark.parametrize("kind", [DataLoader, Own, Reduced, Elaborate])
def test_a_copy_of_what_stands_for_a_data_loader_is_what_it_was(kind: Any) -> None:
    loader = kind(TensorDataset(torch.arange(3)))
    with delivered(loader):
        assert not isinstance(loader, DataLoader)
        copies = [pickle.loads(pickle.dumps(loader)), copy.copy(loader)]
    for each in copies:
        assert type(each) is kind
        assert len(list(each)) == 3
    assert type(loader) is kind


@pytest.mark.parametrize("loader", [Stream(), Whole()], ids=["with a dict", "with slots"])
def test_a_copy_of_what_stands_for_an_iterable_is_what_it_was(loader: Any) -> None:
    kind = type(loader)
    with delivered(loader):
        assert type(loader) is not kind
        copies = [pickle.loads(pickle.dumps(loader)), copy.copy(loader)]
    assert [type(each) for each in copies] == [kind, kind]
    assert type(loader) is kind


def test_methods_find_an_object_of_their_class() -> None:
    loader = Elaborate(TensorDataset(torch.arange(3)))
    with delivered(loader):
        assert len(loader) == 3
        assert loader.note() == 7
        assert loader.calls == 1
        loader.factor = 50
        assert (loader.calls, loader.factor) == (5, 50)
        assert 6 in loader
        with pytest.raises(ValueError, match="after Elaborate is initialized"):
            loader.batch_size = 4
        with pytest.raises(AttributeError, match="Elaborate"):
            loader.missing  # type: ignore[attr-defined]  # noqa: B018
    assert copy.copy(loader).calls == -1
    assert loader.factor == 50
