"""Random object graphs, changed at random: elsewhere and brought home, and directly. Both must end up alike.

A graph is built from a plain description, twice. In one notebook the changes go through a child process, in the other they
are made on the spot. Then both are written down in a canonical form: values, types, and which paths meet in one
object or in one memory. References that the cell cannot see take part, so what was replaced where it had to be
changed in place is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit.roundtrip import Child, Notebook

#: What both notebooks define. Nodes of a graph are numbered; a description of a node refers to earlier and later ones.
DEFINITIONS = """
import numpy as np, torch
class Plain:
    def __init__(self, tag): self.tag = tag
class Slotted:
    __slots__ = ("tag", "a", "b")
    def __init__(self, tag): self.tag = tag
def make(kind, tag, made):
    if kind == "view":
        memories = [node for node in made if isinstance(node, (np.ndarray, torch.Tensor)) and node.ndim == 1]
        if memories:
            return memories[tag % len(memories)][tag % 3:]
        kind = "list"
    if kind == "shared":
        arrays = [node for node in made if isinstance(node, np.ndarray)]
        if arrays and min(arrays[0].strides) > 0:
            return torch.from_numpy(arrays[0])
        kind = "dict"
    return {
        "list": list, "dict": dict, "set": set, "plain": lambda: Plain(tag), "slotted": lambda: Slotted(tag),
        "array": lambda: np.arange(tag, tag + 6.0), "tensor": lambda: torch.arange(tag, tag + 6.0),
        "parameter": lambda: torch.nn.Parameter(torch.arange(tag, tag + 3.0)), "bytes": lambda: bytearray([tag]),
    }[kind]()
def put(node, key, value):
    if isinstance(node, list): node.append(value)
    elif isinstance(node, dict): node[key] = value
    elif isinstance(node, set): node.add(value if isinstance(value, (Plain, Slotted)) else key)
    elif isinstance(node, (Plain, Slotted)): setattr(node, "ab"[key % 2], value)
    elif isinstance(node, bytearray): node.append(key)
    elif isinstance(node, np.ndarray): node[key % len(node) :] += key
    else:
        with torch.no_grad(): node[key % len(node) :].add_(key)
def take(node, key):
    if isinstance(node, list) and node: del node[key % len(node)]
    elif isinstance(node, dict): node.pop(key, None)
    elif isinstance(node, set): node.discard(key)
    elif isinstance(node, (Plain, Slotted)) and hasattr(node, "ab"[key % 2]): delattr(node, "ab"[key % 2])
    elif isinstance(node, torch.nn.Parameter): node.grad = torch.full_like(node, key)
def build(description):
    made = []
    for tag, kind in enumerate(description["kinds"]): made.append(make(kind, tag, made))
    for source, key, target, in_tuple in description["edges"]:
        value = made[target % len(made)]
        put(made[source % len(made)], key, (value, key) if in_tuple else value)
    return made
def change(nodes, changes):
    for what, index, key, target, kind in changes:
        node = nodes[index % len(nodes)]
        if what == "put": put(node, key, nodes[target % len(nodes)])
        elif what == "take": take(node, key)
        elif what == "new": put(node, key, make(kind, key, nodes))
        elif what == "rebind": nodes[index % len(nodes)] = make(kind, key, nodes)
"""

KINDS = ["list", "dict", "set", "plain", "slotted", "array", "tensor", "parameter", "bytes", "view", "shared"]
small = st.integers(0, 7)
graphs = st.fixed_dictionaries({
    "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    "edges": st.lists(st.tuples(small, small, small, st.booleans()), max_size=12),
    # Which of the nodes the cell reaches.
    "reached": st.lists(small, min_size=1, max_size=3),
})
changes = st.lists(
    st.tuples(st.sampled_from(["put", "take", "new", "rebind"]), small, small, small, st.sampled_from(KINDS)), max_size=8
)


def written_down(root: Any) -> list[Any]:
    """Everything reachable from ``root`` in the order of the visit, each object once, with its memory's number."""
    seen: dict[int, int] = {}
    memories: dict[int, int] = {}
    keep_alive: list[Any] = []
    lines: list[Any] = []

    def memory(obj: Any) -> tuple[int, int]:
        if isinstance(obj, torch.Tensor):
            start, offset = obj.untyped_storage().data_ptr(), obj.storage_offset() * obj.itemsize
        else:
            owner = obj
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            start = owner.ctypes.data
            offset = obj.ctypes.data - start
        return memories.setdefault(start, len(memories)), offset

    def visit(obj: Any) -> Any:
        if obj is None or isinstance(obj, (int, float, str)):
            return obj
        if isinstance(obj, tuple):
            return ("tuple", *map(visit, obj))
        if id(obj) in seen:
            return f"#{seen[id(obj)]}"
        number = seen[id(obj)] = len(seen)
        keep_alive.append(obj)
        lines.append((number, type(obj).__name__, *parts(obj)))
        return f"#{number}"

    def parts(obj: Any) -> list[Any]:
        if isinstance(obj, list):
            return [visit(item) for item in obj]
        if isinstance(obj, dict):
            return [(visit(key), visit(value)) for key, value in obj.items()]
        if isinstance(obj, set):
            return [visit(item) for item in sorted(obj, key=lambda item: getattr(item, "tag", item))]
        if isinstance(obj, bytearray):
            return list(obj)
        if isinstance(obj, np.ndarray):
            return [memory(obj), obj.strides, str(obj.dtype), obj.tolist()]
        if isinstance(obj, torch.Tensor):
            grad = visit(obj.grad) if obj.is_leaf else None
            return [memory(obj), obj.stride(), str(obj.dtype), obj.tolist(), obj.requires_grad, grad]
        return [(name, visit(getattr(obj, name))) for name in ("tag", "a", "b") if hasattr(obj, name)]

    visit(root)
    return lines


def after(child: Child, graph: dict[str, Any], moves: list[Any], *, elsewhere: bool) -> list[Any]:
    notebook = Notebook(child)
    notebook.run(DEFINITIONS)
    notebook.names.update(graph=graph, moves=moves)
    notebook.run(
        "held = build(graph)\nreached = [held[i % len(held)] for i in graph['reached']]\nfirst, mirror = reached[0], reached"
    )
    cell = "change(reached, moves); last = reached[-1]; both = [first, last]"
    if elsewhere:
        trip = notebook.cell(cell)
        assert (trip.not_home, trip.problems, trip.refused) == ({}, [], {})
    else:
        notebook.run(cell)
    return written_down([notebook[name] for name in ("reached", "first", "last", "both", "mirror", "held")])


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(graph=graphs, moves=changes)
def test_a_changed_graph_comes_home_as_if_it_had_been_changed_here(
    child: Child, graph: dict[str, Any], moves: list[Any]
) -> None:
    assert after(child, graph, moves, elsewhere=True) == after(child, graph, moves, elsewhere=False)


def test_the_comparison_sees_a_replaced_object() -> None:
    shared: list[int] = [1]
    assert written_down([shared, shared]) != written_down([[1], [1]])
    array = np.ones(4)
    assert written_down([array, array[1:]]) != written_down([array, array.copy()[1:]])
    assert written_down([torch.from_numpy(array), array]) != written_down([torch.ones(4, dtype=torch.float64), array])
