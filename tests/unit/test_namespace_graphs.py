"""Random object graphs, changed at random: elsewhere and brought home, and directly. Both must end up alike.

A graph is built from a plain description, twice. In one notebook the changes go through a child process, in the other
they are made on the spot. Then both are written down in a canonical form: values, types, and which paths meet in one
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
    def __init__(self): self.tag = serial()
class Slotted:
    __slots__ = ("tag", "a", "b")
    def __init__(self): self.tag = serial()
num_made = 0
def serial():
    global num_made
    num_made += 1
    return num_made
def make(kind, tag, made):
    if kind == "view":
        memories = [node for node in made if isinstance(node, (np.ndarray, torch.Tensor)) and node.ndim == 1]
        if memories:
            memory = memories[tag % len(memories)]
            # A view that needs gradients comes home without the graph behind it, so is not the same as here.
            return (memory.detach() if isinstance(memory, torch.Tensor) else memory)[tag % 3:]
        kind = "list"
    if kind == "shared":
        arrays = [node for node in made if isinstance(node, np.ndarray)]
        if arrays and min(arrays[0].strides) > 0:
            return torch.from_numpy(arrays[0])
        kind = "dict"
    return {
        "list": list, "dict": dict, "set": set, "plain": Plain, "slotted": Slotted,
        "array": lambda: np.arange(tag, tag + 6.0), "tensor": lambda: torch.arange(tag, tag + 6.0),
        "parameter": lambda: torch.nn.Parameter(torch.arange(tag, tag + 3.0)), "bytes": lambda: bytearray([tag]),
    }[kind]()
def put(node, key, value):
    if isinstance(node, list): node.append(value)
    elif isinstance(node, dict): node[key] = value
    elif isinstance(node, set): node.add(value if isinstance(value, (Plain, Slotted)) else key)
    elif isinstance(node, (Plain, Slotted)): setattr(node, "ab"[key % 2], value)
    elif isinstance(node, bytearray): node.append(key)
    elif isinstance(node, np.ndarray): node[key % max(1, len(node)) :] += key
    else:
        with torch.no_grad(): node[key % max(1, len(node)) :].add_(key)
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
graphs = st.fixed_dictionaries(
    {
        "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
        "edges": st.lists(st.tuples(small, small, small, st.booleans()), max_size=12),
        # Which of the nodes the cell reaches.
        "reached": st.lists(small, min_size=1, max_size=3),
    }
)
changes = st.lists(
    st.tuples(st.sampled_from(["put", "take", "new", "rebind"]), small, small, small, st.sampled_from(KINDS)),
    max_size=8,
)


class Writing:
    """Writes down everything reachable from an object in the order of the visit, each object once."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        #: The addresses of the memories, by the number that stands in the lines.
        self.spans: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}
        self._keep_alive: list[Any] = []

    def visit(self, obj: Any) -> Any:
        """Write down an object, unless that has been done, and return what stands for it."""
        if obj is None or isinstance(obj, (int, float, str)):
            return obj
        if isinstance(obj, tuple):
            return ("tuple", *map(self.visit, obj))
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._numbers)
            self._keep_alive.append(obj)
            self.lines.append((number, type(obj).__name__, *self._parts(obj)))
        return f"#{number}"

    def _parts(self, obj: Any) -> list[Any]:
        if isinstance(obj, (np.ndarray, torch.Tensor)):
            return self._array(obj)
        if isinstance(obj, dict):
            return [(self.visit(key), self.visit(value)) for key, value in obj.items()]
        if isinstance(obj, set):
            return [self.visit(item) for item in sorted(obj, key=lambda item: (hasattr(item, "tag"), _order(item)))]
        if isinstance(obj, (list, bytearray)):
            return [self.visit(item) for item in obj]
        return [(name, self.visit(getattr(obj, name))) for name in ("tag", "a", "b") if hasattr(obj, name)]

    def _array(self, obj: Any) -> list[Any]:
        array = obj.detach().numpy() if isinstance(obj, torch.Tensor) else obj
        self.spans.append(np.lib.array_utils.byte_bounds(array))
        facts = [len(self.spans) - 1, array.strides, str(array.dtype), array.tolist()]
        if isinstance(obj, torch.Tensor):
            facts += [obj.requires_grad, self.visit(obj.grad) if obj.is_leaf else None]
        return facts


def _order(member: Any) -> int:
    order: int = getattr(member, "tag", member)
    return order


def written_down(root: Any) -> tuple[list[Any], list[Any]]:
    """The canonical form of all that ``root`` reaches: the objects, and how their memories lie."""
    writing = Writing()
    writing.visit(root)
    return writing.lines, places(writing.spans)


def places(spans: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """For each span of addresses: the first span that lies in one memory with it, and its place in that memory."""
    groups: list[list[int]] = []
    end = -1
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        if spans[index][0] < end:
            groups[-1].append(index)
        else:
            groups.append([index])
        end = max(end, spans[index][1])
    found = {}
    for group in groups:
        start = min(spans[index][0] for index in group)
        found.update({index: (min(group), spans[index][0] - start, spans[index][1] - start) for index in group})
    return [found[index] for index in range(len(spans))]


def after(child: Child, graph: dict[str, Any], moves: list[Any], *, elsewhere: bool) -> tuple[list[Any], list[Any]]:
    notebook = Notebook(child)
    notebook.run(DEFINITIONS)
    notebook.names.update(graph=graph, moves=moves)
    notebook.run(
        "held = build(graph)\nreached = [held[i % len(held)] for i in graph['reached']]\n"
        "first, mirror = reached[0], reached"
    )
    cell = "change(reached, moves); last = reached[-1]; both = [first, last]"
    if elsewhere:
        trip = notebook.cell(cell)
        assert (trip.not_home, trip.problems, trip.refused) == ({}, [], {})
    else:
        notebook.run(cell)
    return written_down([notebook[name] for name in ("reached", "first", "last", "both", "mirror", "held")])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
