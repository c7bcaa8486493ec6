"""When the runner forks a preloaded zygote, and when the one that it has will do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from taas_magic.channel import Channel
from taas_magic.runner.preloading import Preloading
from taas_magic.runner.zygote_link import PreloadedZygote
from taas_magic.wire import Preload
from taas_magic.wire_zygote import FromZygote, Preloaded, PreloadRefused

ENVIRONMENT = {"A": "1"}


class Zygote:
    """Stands in for the zygote: notes what is asked for, and holds the other end of what it gives."""

    def __init__(self) -> None:
        self.orders: list[list[str]] = []
        self.channels: list[Channel[Any]] = []

    def fork_preloaded(self, modules: list[str], environment: dict[str, str]) -> PreloadedZygote:
        ours, theirs = Channel.pair()
        self.orders.append(modules)
        self.channels.append(Channel(theirs, FromZygote))
        return PreloadedZygote(Channel(ours, FromZygote), modules, environment)


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    for channel in zygote.channels:
        channel.close()


@pytest.fixture
def preloading(zygote: Zygote) -> Iterator[Preloading]:
    preloading = Preloading(zygote)  # type: ignore[arg-type]
    yield preloading
    preloading.close()


def want(preloading: Preloading, *modules: str, environment: dict[str, str] = ENVIRONMENT) -> None:
    preloading.want(Preload(list(modules), environment))
    preloading.advance(is_idle=True)


def finish(preloading: Preloading, zygote: Zygote, *loaded: str) -> None:
    zygote.channels[-1].send(Preloaded(zygote.orders[-1], 0.1, list(loaded)))
    preloading.hear()
    preloading.advance(is_idle=True)


def test_nothing_is_forked_while_a_run_is_active(preloading: Preloading, zygote: Zygote) -> None:
    preloading.want(Preload(["pandas"], ENVIRONMENT))
    preloading.advance(is_idle=False)
    assert zygote.orders == []
    preloading.advance(is_idle=True)
    assert zygote.orders == [["pandas"]]


def test_imports_in_progress_are_not_thrown_away_for_a_longer_list(preloading: Preloading, zygote: Zygote) -> None:
    want(preloading, "lightning")
    want(preloading, "lightning", "lightning.trainer")
    assert zygote.orders == [["lightning"]]
    finish(preloading, zygote, "lightning", "lightning.trainer", "torchmetrics")
    assert zygote.orders == [["lightning"]], "the first import brought the other along"
    assert preloading.fit_for(ENVIRONMENT) is not None


def test_what_is_really_new_is_imported_in_a_new_one(preloading: Preloading, zygote: Zygote) -> None:
    want(preloading, "pandas")
    want(preloading, "pandas", "sklearn")
    finish(preloading, zygote, "pandas")
    assert zygote.orders == [["pandas"], ["pandas", "sklearn"]]
    assert preloading.fit_for(ENVIRONMENT) is None, "its imports are not done"


def test_a_module_that_fails_to_import_is_tried_once(preloading: Preloading, zygote: Zygote) -> None:
    want(preloading, "broken", "pandas")
    finish(preloading, zygote, "pandas")
    want(preloading, "broken", "pandas")
    assert zygote.orders == [["broken", "pandas"]]


def test_another_environment_needs_other_imports(preloading: Preloading, zygote: Zygote) -> None:
    want(preloading, "pandas")
    finish(preloading, zygote, "pandas")
    assert preloading.fit_for({"A": "2"}) is None
    want(preloading, "pandas", environment={"A": "2"})
    assert zygote.orders == [["pandas"], ["pandas"]]


def test_a_module_that_makes_forking_unsafe_is_left_out(preloading: Preloading, zygote: Zygote) -> None:
    want(preloading, "pandas", "threads")
    zygote.channels[-1].send(PreloadRefused("threads", "it starts a thread"))
    zygote.channels[-1].close()
    preloading.hear()
    preloading.advance(is_idle=True)
    assert zygote.orders == [["pandas", "threads"], ["pandas"]]
    assert preloading.refused == {"threads": "it starts a thread"}


def test_it_is_known_when_all_that_was_wanted_is_there(preloading: Preloading, zygote: Zygote) -> None:
    assert preloading.is_settled
    want(preloading, "pandas")
    assert not preloading.is_settled
    finish(preloading, zygote, "pandas", "numpy")
    assert preloading.is_settled
    want(preloading, "numpy")
    assert preloading.is_settled
    want(preloading, "scipy")
    assert not preloading.is_settled
    zygote.channels[-1].close()
    preloading.hear()
    assert preloading.is_settled, "it will not come"
