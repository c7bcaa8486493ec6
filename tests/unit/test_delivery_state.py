"""The delivery's state machine, played against random producers, ranks and deaths."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.delivery_sim import Sim, Source

from taas_magic.data.iteration import StreamSpec
from taas_magic.wire_data import Position


def map_spec(**changes):
    return StreamSpec(**{"name": "train", "is_map": True, **changes})


def expected(elements, num_ranks, rank):
    return [element for place, element in enumerate(elements) if place % num_ranks == rank]


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_ranks=st.integers(1, 5),
    num_elements=st.integers(0, 60),
    num_producers=st.integers(1, 5),
    memory=st.sampled_from([4096, 20_000, 2**20]),
    kill_rate=st.sampled_from([0, 0.02]),
    epochs=st.integers(1, 3),
)
def test_every_element_comes_once_and_in_order(  # noqa: PLR0917 - what is drawn
    seed, num_ranks, num_elements, num_producers, memory, kill_rate, epochs
):
    sim = Sim(
        [map_spec()],
        [Source(num_elements)],
        num_ranks=num_ranks,
        num_producers=num_producers,
        memory_bytes=memory,
        seed=seed,
        kill_rate=kill_rate,
    )

    def program(rank):
        for index in range(epochs):
            yield from sim.iterate(rank, 0, index)

    sim.run(*[program(rank) for rank in range(num_ranks)])
    whole = num_elements - num_elements % num_ranks
    for rank, state in enumerate(sim.ranks):
        for index in range(epochs):
            assert state.got[0, index] == expected([(0, index, k) for k in range(whole)], num_ranks, rank)
    assert any("dropped" in text for text in sim.said) == (whole != num_elements)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    num_ranks=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=4).map(tuple),
    kill_rate=st.sampled_from([0, 0.01]),
    lazy=st.booleans(),
    memory=st.sampled_from([4096, 2**20]),
)
def test_shards_are_taken_in_turn_until_each_has_ended(  # noqa: PLR0917 - what is drawn
    seed, num_ranks, lengths, kill_rate, lazy, memory
):
    spec = StreamSpec("stream", False, len(lengths), drops_tail=False, is_lazy=lazy)
    sim = Sim(
        [spec],
        [Source(shard_lengths=lengths)],
        num_ranks=num_ranks,
        seed=seed,
        kill_rate=kill_rate,
        memory_bytes=memory,
    )
    sim.run(*[sim.iterate(rank, 0, 0) for rank in range(num_ranks)])
    shards = len(lengths)
    order = [(0, 0, j * shards + w) for j in range(max(lengths)) for w in range(shards) if j < lengths[w]]
    for rank, state in enumerate(sim.ranks):
        assert state.got[0, 0] == expected(order, num_ranks, rank)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    num_elements=st.integers(0, 40),
    kill_rate=st.sampled_from([0, 0.02]),
    start=st.integers(0, 20),
)
def test_logical_workers_begin_again_where_one_was_killed(seed, workers, num_elements, kill_rate, start):
    start = min(start, num_elements)
    spec = map_spec(num_shards=workers, start=Position(7, 2, start))
    sim = Sim([spec], [Source(num_elements)], num_ranks=1, seed=seed, kill_rate=kill_rate)
    sim.run(sim.iterate(0, 0, 0))
    assert sim.ranks[0].got[0, 0] == [(0, 2, k) for k in range(start, num_elements)]


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32), num_ranks=st.integers(1, 4), num_elements=st.integers(1, 30), units=st.integers(1, 100)
)
def test_units_end_the_iteration_at_the_same_step(seed, num_ranks, num_elements, units):
    spec = map_spec(units=units, cycles=True)
    sim = Sim([spec], [Source(num_elements)], num_ranks=num_ranks, seed=seed)

    def program(rank):
        yield from sim.iterate(rank, 0, 0)
        yield from sim.iterate(rank, 0, 1)

    sim.run(*[program(rank) for rank in range(num_ranks)])
    an_epoch = num_elements - num_elements % num_ranks
    steps = units // num_ranks if an_epoch else 0
    for rank, state in enumerate(sim.ranks):
        assert len(state.got[0, 0]) == steps
        stream = [(0, place // an_epoch, place % an_epoch) for place in range(steps * num_ranks)]
        assert state.got[0, 0] == expected(stream, num_ranks, rank)
        assert state.got[0, 1] == [] or not an_epoch or units // num_ranks == 0


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), first=st.integers(0, 9), then=st.integers(1, 4))
def test_a_stream_is_taken_up_where_it_was_with_other_ranks(seed, first, then):
    sim = Sim([map_spec()], [Source(40)], num_ranks=2, seed=seed)
    sim.run(*[sim.iterate(rank, 0, 0, limit=first) for rank in range(2)])
    place = sim.ranks[0].behind.get((0, 0), Position(0, 0, 0))
    assert place.element == 2 * first
    other = Sim([map_spec()], [Source(40)], num_ranks=then, seed=seed)
    other.run(*[other.iterate(rank, 0, 0, start=place) for rank in range(then)])
    rest = [(0, 0, k) for k in range(2 * first, 40)]
    rest = rest[: len(rest) - len(rest) % then]
    for rank, state in enumerate(other.ranks):
        assert state.got[0, 0] == expected(rest, then, rank)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 3), bad=st.frozensets(st.integers(0, 19), max_size=5))
def test_bad_elements_are_skipped_where_that_is_wanted(seed, ranks, bad):
    sim = Sim([map_spec(skips_errors=True, drops_tail=False)], [Source(20, bad=bad)], num_ranks=ranks, seed=seed)
    sim.run(*[sim.iterate(rank, 0, 0) for rank in range(ranks)])
    good = [(0, 0, k) for k in range(20) if k not in bad]
    for rank, state in enumerate(sim.ranks):
        assert state.got[0, 0] == expected(good, ranks, rank)


def test_a_bad_element_is_raised_on_the_rank_that_was_to_get_it():
    sim = Sim([map_spec()], [Source(12, bad=frozenset({5}))], num_ranks=2)
    sim.run(*[sim.iterate(rank, 0, 0) for rank in range(2)])
    assert sim.ranks[0].got[0, 0] == [(0, 0, k) for k in range(0, 12, 2)]
    assert sim.ranks[1].got[0, 0] == [(0, 0, 1), (0, 0, 3), "ValueError", *[(0, 0, k) for k in (7, 9, 11)]]


def test_an_element_that_kills_is_given_up_after_three_producers():
    sim = Sim([map_spec()], [Source(12, poison=frozenset({4}))], num_ranks=2)
    sim.run(*[sim.iterate(rank, 0, 0) for rank in range(2)])
    assert sim.ranks[0].got[0, 0] == [(0, 0, 0), (0, 0, 2), "PoisonElementError", *[(0, 0, k) for k in (6, 8, 10)]]
    assert not sim.failed


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), num_ranks=st.integers(2, 5), extra=st.integers(1, 4))
def test_a_padded_tail_repeats_the_first_elements(seed, num_ranks, extra):
    extra = extra % num_ranks or 1
    total = 3 * num_ranks + extra
    sim = Sim([map_spec(drops_tail=False, pads_tail=True)], [Source(total)], num_ranks=num_ranks, seed=seed)
    sim.run(*[sim.iterate(rank, 0, 0) for rank in range(num_ranks)])
    padded = [(0, 0, k) for k in [*range(total), *range(num_ranks - extra)]]
    for rank, state in enumerate(sim.ranks):
        assert state.got[0, 0] == expected(padded, num_ranks, rank)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), memory=st.sampled_from([4096, 40_000]))
def test_two_loaders_of_which_one_is_nested_and_one_is_left_early(seed, memory):
    specs = [map_spec(), StreamSpec("val", True, drops_tail=False, is_lazy=True)]
    sim = Sim(specs, [Source(20), Source(7)], num_ranks=2, seed=seed, memory_bytes=memory)

    def program(rank):
        outer = sim.iterate(rank, 0, 0)
        for _ in range(4):
            yield next(outer, None)
        yield from sim.iterate(rank, 1, 0)
        yield from sim.iterate(rank, 0, 1, limit=3)
        yield from outer
        yield from sim.iterate(rank, 1, 1)

    sim.run(*[program(rank) for rank in range(2)])
    for rank, state in enumerate(sim.ranks):
        assert state.got[0, 0] == expected([(0, 0, k) for k in range(20)], 2, rank)
        assert state.got[0, 1] == expected([(0, 1, k) for k in range(20)], 2, rank)[:3]
        for index in range(2):
            assert state.got[1, index] == expected([(1, index, k) for k in range(7)], 2, rank)


def test_a_rank_that_lags_holds_nobody_up():
    sim = Sim([map_spec()], [Source(400)], num_ranks=2, memory_bytes=20_000)
    sim.run(sim.iterate(0, 0, 0))
    assert sim.ranks[0].got[0, 0] == [(0, 0, k) for k in range(0, 400, 2)]
    sim.run(sim.iterate(1, 0, 0))
    assert sim.ranks[1].got[0, 0] == [(0, 0, k) for k in range(1, 400, 2)]


def test_what_one_rank_alone_iterates_leaves_nothing_behind_and_is_there_for_who_comes_late():
    sim = Sim([map_spec(drops_tail=False)], [Source(11)], num_ranks=2, memory_bytes=20_000)

    def program(rank, iterations):
        for index in iterations:
            yield from sim.iterate(rank, 0, index)

    sim.run(program(0, range(12)))
    assert len(sim.delivery.streams[0].iterations) <= 3
    sim.run(program(1, [*range(12), 12]), program(0, [12]))
    for index in range(13):
        for rank in range(2):
            assert sim.ranks[rank].got[0, index] == expected([(0, index, k) for k in range(11)], 2, rank)
    assert all(each.index > 12 for each in sim.delivery.streams[0].iterations.values())
