"""Elements as bytes: what a producer writes is what a rank reads, whatever it is."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import gc
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from taas_magic import processes
from taas_magic.data.elements import Encoder, decode
from taas_magic.data.making import units_of
from taas_magic.namespace.bulk import address_of

# Said once a process of `torch.complex32`.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: int
    meta: dict[str, Any]


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def base_of(data: bytes) -> Any:
    """Memory of a rank that holds an element."""
    return np.frombuffer(bytearray(data), np.uint8)


def trip(element: Any, shared: Mapping[int, int] | None = None, objects: Mapping[int, Any] | None = None) -> Any:
    """What arrives; the sender's memory has gone by then."""
    encoded = Encoder(shared or {}).encode(element)
    data = encoded.to_bytes()
    assert len(data) == encoded.size_bytes
    return decode(base_of(data), objects or {})


def raw(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor's elements, in order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(flat.view(torch.uint8).numpy())


def assert_same_tensor(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert raw(got) == raw(sent)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(np.prod(shape)) if shape else 1
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    for _ in range(draw(st.integers(0, 3))):
        tensor = draw(st.sampled_from([transposed, sliced, stepped, expanded]))(draw, tensor)
    return tensor


def transposed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


def sliced(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[draw(st.integers(0, 2)) :] if tensor.dim() else tensor


def stepped(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :: draw(st.integers(1, 4))] if tensor.dim() else tensor


def expanded(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)


@given(tensor=tensors())
def test_tensors_of_all_types_shapes_and_strides(tensor: torch.Tensor) -> None:
    got = trip(tensor)
    assert_same_tensor(got, tensor)
    if got.numel() and not any(step == 0 and size > 1 for step, size in zip(got.stride(), got.shape, strict=True)):
        # It is the receiver's own, to be changed in place.
        got.zero_()
        assert not any(raw(got))


@given(
    array=hnp.arrays(
        st.one_of(
            hnp.scalar_dtypes(),
            hnp.byte_string_dtypes(max_len=5),
            hnp.unicode_string_dtypes(max_len=5),
            hnp.array_dtypes(),
        ),
        hnp.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=5),
    ),
    how=st.sampled_from(["as it is", "backwards", "transposed", "stepped", "broadcast", "fortran"]),
)
def test_arrays_of_all_types_shapes_and_strides(array: Any, how: str) -> None:
    if how == "backwards" and array.ndim:
        array = array[::-1]
    elif how == "transposed":
        array = array.T
    elif how == "stepped" and array.ndim:
        array = array[..., ::3]
    elif how == "broadcast":
        array = np.broadcast_to(array, (2, *array.shape))
    elif how == "fortran":
        array = np.asfortranarray(array)
    got = trip(array)
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tobytes() == array.tobytes()


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=9),
    st.binary(max_size=9),
    st.just(Colour.RED),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(element=NESTED)
def test_nested_elements_of_any_kind(element: Any) -> None:
    got = trip(element)
    assert got == element
    assert type(got) is type(element)


def assert_same(got: Any, sent: Any) -> None:
    """Equal all through, types included."""
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert_same_tensor(got.to_dense(), sent.to_dense())
    elif isinstance(sent, np.ndarray):
        assert got.dtype == sent.dtype
        assert got.tolist() == sent.tolist()
    elif isinstance(sent, (pd.DataFrame, pd.Series)):
        assert got.equals(sent)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key in sent:
            assert_same(got[key], sent[key])
    elif isinstance(sent, (list, tuple)):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(sent):
        assert_same(vars(got), vars(sent))
    elif isinstance(sent, Slotted):
        assert_same(got.value, sent.value)
    else:
        assert got == sent


PARTS: dict[str, Any] = {
    "sparse tensor": torch.eye(4).to_sparse(),
    "tensor in a dataclass": Sample(torch.arange(6.0).view(2, 3), 3, {"name": "a", "at": dt.date(2020, 1, 2)}),
    "slots": Slotted([torch.ones(3), b"bytes"]),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "tensor with a gradient": torch.ones(3, requires_grad=True),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "imaginary part of a conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "tensor with an attribute": torch.ones(2),
    "scalar array": np.array(3.5),
    "numpy scalar": np.float32(2.5),
    "structured": np.array([(1, 2.5, b"ab"), (3, 4.5, b"c")], dtype=[("a", "i4"), ("b", ">f8"), ("c", "S3")]),
    "objects": np.array([None, "text", [1, 2], {"a": 1}], dtype=object),
    "structured with objects": np.array([(1, "x"), (2, None)], dtype=[("a", "i8"), ("b", "O")]),
    "dates": np.array(["2020-01-02", "NaT"], dtype="M8[D]"),
    "big-endian": np.arange(5, dtype=">i4"),
    "strings of any length": np.array(["a", "long " * 20, ""], dtype=np.dtypes.StringDType()),
    "matrix with a mask": np.ma.masked_array([1, 2, 3], mask=[True, False, False]).filled(9),
    "empty": [torch.empty(0, 3), np.empty((2, 0)), b"", "", [], {}, ()],
    "bytes-like": [bytearray(b"changeable"), b"x" * 300_000],
    "range and slices": [range(3, 9, 2), slice(1, 2), frozenset({1}), {2, 3}, complex(1, 2)],
    "frame": pd.DataFrame({"a": [1, 2], "b": ["x", None], "c": pd.Categorical(["u", "v"])}),
    "ordered": collections.OrderedDict([("b", 1), ("a", torch.zeros(1))]),
}
PARTS["tensor with an attribute"].label = "here"


@pytest.mark.parametrize("name", PARTS)
def test_each_kind_of_object_arrives_as_it_is(name: str) -> None:
    assert_same(trip(PARTS[name]), PARTS[name])


def test_what_a_tensor_is_beside_its_contents_arrives() -> None:
    leaf, named, strided = trip(
        [torch.ones(3, requires_grad=True), PARTS["tensor with an attribute"], torch.ones(4, 6).t()]
    )
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert named.label == "here"
    assert strided.stride() == (1, 6)
    channels_last = trip(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert channels_last.is_contiguous(memory_format=torch.channels_last)


def test_a_picture_arrives() -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    got = trip({"picture": picture})["picture"]
    assert (got.mode, got.size, got.tobytes()) == (picture.mode, picture.size, picture.tobytes())


def test_a_masked_array_keeps_its_mask() -> None:
    got = trip(np.ma.masked_array([1.0, 2.0, 3.0], mask=[True, False, False]))
    assert got.mask.tolist() == [True, False, False]
    assert got.sum() == 5.0


def test_one_object_that_is_there_twice_is_one_again() -> None:
    tensor, array, inner = torch.ones(3), np.ones(3), [1]
    element: dict[str, Any] = {"t": tensor, "also": tensor, "a": array, "b": array, "inner": inner, "same": [inner]}
    element["itself"] = element
    got = trip(element)
    assert got["t"] is got["also"]
    assert got["a"] is got["b"]
    assert got["same"][0] is got["inner"]
    assert got["itself"] is got


def test_a_small_view_of_something_large_takes_what_it_shows() -> None:
    large = torch.zeros(1_000_000)
    array = np.zeros((1000, 1000))
    for view in (large[:10], large[::100_000], array[::200, ::200], array[-1]):
        assert Encoder({}).encode(view).size_bytes < 10_000
    assert Encoder({}).encode(torch.zeros(1).expand(1_000_000)).size_bytes < 10_000


def test_a_class_of_the_notebook_is_the_ranks_own() -> None:
    def make(name: str) -> Any:
        return type(name, (), {"__module__": "__main__"})

    theirs, ours = make("Batch"), make("Batch")
    function, other = (lambda: 1), (lambda: 2)
    element: Any = theirs()
    element.value, element.function = torch.ones(2), function
    got = trip([element, theirs], {id(theirs): 7, id(function): 8}, {7: ours, 8: other})
    assert type(got[0]) is ours
    assert got[1] is ours
    assert got[0].function is other
    assert got[0].value.tolist() == [1, 1]


def test_a_class_that_ranks_do_not_know_comes_along() -> None:
    kind: Any = type("Inner", (), {"__module__": "__main__", "double": lambda self: 2 * self.value})
    element: Any = kind()
    element.value = 21
    assert trip(element).double() == 42


def test_an_element_within_an_element_is_decoded_on_the_way() -> None:
    class Nested:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __reduce__(self) -> Any:
            return _open_nested, (Encoder({}).encode(self.inner).to_bytes(),)

    before, inner, after = trip([torch.ones(2), Nested(torch.arange(3)), torch.full((2,), 5.0)])
    assert (before.tolist(), inner.tolist(), after.tolist()) == ([1, 1], [0, 1, 2], [5, 5])


def _open_nested(data: bytes) -> Any:
    return decode(base_of(data), {})


def test_an_encoder_is_good_for_more_after_an_element_that_cannot_be_pickled() -> None:
    encoder = Encoder({})
    with pytest.raises(TypeError):
        encoder.encode([torch.ones(3), (number for number in range(3))])
    first = [torch.ones(4)]
    assert decode(base_of(encoder.encode(first).to_bytes()), {})[0].tolist() == [1, 1, 1, 1]
    # Nothing is remembered of the element before: the same object goes again.
    first[0].fill_(2)
    assert decode(base_of(encoder.encode(first).to_bytes()), {})[0].tolist() == [2, 2, 2, 2]


def test_memory_of_an_element_is_free_when_the_last_that_lies_in_it_is_gone() -> None:
    encoder = Encoder({})
    data = encoder.encode({"x": torch.arange(100), "y": [np.arange(50), pd.Series(np.arange(9))]}).to_bytes()
    base = base_of(data)
    alive = weakref.ref(base)
    element = decode(base, {})
    del base
    row = element["x"].view(10, 10)[3]
    part = element["y"][0][10:20].reshape(2, 5)
    gc.collect()
    assert alive() is not None
    del element
    gc.collect()
    assert alive() is not None
    assert row.tolist() == list(range(30, 40))
    del row
    gc.collect()
    assert alive() is not None
    assert part.tolist() == [list(range(10, 15)), list(range(15, 20))]
    del part
    gc.collect()
    assert alive() is None


@given(element=st.lists(st.one_of(NESTED, tensors()), max_size=4))
def test_elements_lie_where_they_are_written_and_nowhere_else(element: Any) -> None:
    encoded = Encoder({}).encode(element)
    memory = np.full(encoded.size_bytes + 128, 0xA5, np.uint8)
    encoded.write(address_of(memory) + 64)
    assert (memory[:64] == 0xA5).all()
    assert (memory[64 + encoded.size_bytes :] == 0xA5).all()
    got = decode(memory[64 : 64 + encoded.size_bytes], {})
    for one, other in zip(got, element, strict=True):
        if isinstance(other, torch.Tensor):
            assert_same_tensor(one, other)
        else:
            assert one == other


def test_another_process_writes_and_this_one_reads() -> None:
    element = {
        "tensors": [torch.arange(20_000).view(100, 200).t(), torch.ones(0, 2), torch.tensor(3.0, dtype=torch.bfloat16)],
        "arrays": (np.arange(10_000)[::-2], np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])),
        "sample": Sample(torch.eye(3).to_sparse(), 1, {"colour": Colour.RED}),
    }
    size = Encoder({}).encode(element).size_bytes
    fd = os.memfd_create("elements")
    os.truncate(fd, size)
    memory = mmap.mmap(fd, size)

    def be_producer() -> None:
        Encoder({}).encode(element).write(address_of(memory))
        os._exit(0)

    pid = processes.fork(be_producer)
    assert os.waitpid(pid, 0)[1] == 0
    assert_same(decode(np.frombuffer(memory, np.uint8), {}), element)
    os.close(fd)


class Hinting:
    def __init__(self, hints: Any) -> None:
        self.hints = hints


@pytest.mark.parametrize("make", [lambda hints: {"x": 1, "hints": hints}, Hinting], ids=["a mapping", "an object"])
def test_an_element_says_how_many_units_it_is(make: Any) -> None:
    assert units_of(make({"units": 3})) == 3
    assert units_of(make({"units": torch.tensor(4)})) == 4
    assert units_of(make({"units": 0})) == 0
    assert units_of(make({})) == 1
    assert units_of(make("units")) == 1
    for wrong in (-1, 1.5, "three", None):
        with pytest.raises(ValueError, match="expected: a whole number"):
            units_of(make({"units": wrong}))


@pytest.mark.parametrize("element", [None, 3, "hints", [1], torch.ones(2), {"units": 5}], ids=repr)
def test_an_element_that_says_nothing_is_one_unit(element: Any) -> None:
    assert units_of(element) == 1
