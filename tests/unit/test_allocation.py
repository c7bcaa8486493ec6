"""GPUs are given out first come, first served, and each to one owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_magic.machines.allocation import Allocation, Grant, Queued, TooManyError
from taas_magic.machines.gpu_locks import GpuLocks


def test_neighbours_are_given_where_there_are_some() -> None:
    gpus = Allocation("abcdef")
    assert gpus.ask("one", 2) == [Grant("one", ("a", "b"))]
    assert gpus.ask("two", 1) == [Grant("two", ("c",))]
    assert gpus.ask("three", 2) == [Grant("three", ("d", "e"))]
    gpus.release("one")
    gpus.release("three")
    assert gpus.ask("four", 3) == [Grant("four", ("d", "e", "f"))]


def test_who_wants_many_is_not_overtaken() -> None:
    gpus = Allocation("abcd")
    gpus.ask("one", 3)
    assert gpus.ask("many", 4) == [Queued("many", 1)]
    assert gpus.ask("few", 1) == [Queued("few", 2)]
    assert gpus.release("one") == [Grant("many", tuple("abcd")), Queued("few", 1)]
    assert gpus.release("many") == [Grant("few", ("a",))]
    assert gpus.num_free == 3


def test_who_gives_up_makes_room() -> None:
    gpus = Allocation("ab")
    gpus.ask("one", 2)
    gpus.ask("two", 2)
    gpus.ask("three", 1)
    assert gpus.release("two") == [Queued("three", 1)]
    assert gpus.release("nobody") == []
    with pytest.raises(ValueError, match="has asked already"):
        gpus.ask("three", 1)


def test_what_the_machine_has_not_is_refused() -> None:
    with pytest.raises(TooManyError, match="3 are asked for, and the machine has 2"):
        Allocation("ab").ask("one", 3)


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(1, 6),
    events=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=60),
)
def test_every_gpu_has_one_owner_and_the_first_goes_first(size: int, events: list[tuple[int, int, bool]]) -> None:
    gpus = Allocation([str(number) for number in range(size)])
    order: list[int] = []
    wanted: dict[int, int] = {}
    for owner, count, asks in events:
        if asks and owner not in wanted and count <= size:
            wanted[owner] = count
            order.append(owner)
            out = gpus.ask(owner, count)
        else:
            wanted.pop(owner, None)
            order = [each for each in order if each != owner]
            out = gpus.release(owner)
        for each in out:
            if isinstance(each, Grant):
                assert each.owner == order.pop(0)
                assert len(set(each.gpus)) == wanted[int(str(each.owner))]
            else:
                assert order[each.place - 1] == each.owner
        gpus.check()


# ---- several runners on one machine


def test_runners_do_not_give_out_each_others_gpus(tmp_path: Path) -> None:
    one, other = (GpuLocks(tmp_path, ["a", "b", "c"]) for _ in range(2))
    assert one.take(2) == ["a", "b"]
    assert (one.num_free, other.num_free) == (1, 1)
    assert other.take(2) is None
    assert other.take(1) == ["c"]
    one.release(["a"])
    assert other.take(1) == ["a"]
    assert one.take(1) is None


def test_tickets_are_served_in_the_order_in_which_they_were_drawn(tmp_path: Path) -> None:
    one, other = (GpuLocks(tmp_path, ["a"]) for _ in range(2))
    first, second = one.queue(), other.queue()
    third = one.queue()
    assert [one.place_of(first), other.place_of(second), one.place_of(third)] == [1, 2, 3]
    one.give_up(first)
    assert [other.place_of(second), one.place_of(third)] == [1, 2]
    other.give_up(second)
    one.give_up(third)
    assert not list((tmp_path / "queue").iterdir())


def test_what_a_killed_runner_had_is_free(tmp_path: Path) -> None:
    source = (
        "import sys, time; from pathlib import Path; from taas_magic.machines.gpu_locks import GpuLocks\n"
        "locks = GpuLocks(Path(sys.argv[1]), ['a', 'b']); ticket = locks.queue()\n"
        "print(locks.take(2), flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "['a', 'b']\n"
        own = GpuLocks(tmp_path, ["a", "b"])
        ticket = own.queue()
        assert own.take(1) is None
        assert own.place_of(ticket) == 2
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert own.place_of(ticket) == 1
    assert own.take(2) == ["a", "b"]
    own.give_up(ticket)
