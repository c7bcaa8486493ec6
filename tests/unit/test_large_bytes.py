"""A large ``bytes`` is one copy a machine, and still an object like any other."""

from __future__ import annotations

import pickle

from unit.roundtrip import Notebook

SIZE = 3 * 2**20


def test_it_arrives_as_it_is_and_is_the_notebooks_own_again(notebook: Notebook) -> None:
    notebook.run(f"data = bytes(range(256)) * {SIZE // 256}; holder = {{'same': data}}")
    trip = notebook.cell(
        f"""
import pickle
assert type(data) is bytes and len(data) == {SIZE} and data[:3] == b"\\0\\1\\2" and data[-1] == 255
assert holder["same"] is data and hash(data) == hash(bytes(bytearray(data))) and data == bytes(bytearray(data))
assert data.count(b"\\x07") == {SIZE // 256} and pickle.loads(pickle.dumps(data)) == data and {{data: 1}}[data] == 1
again = [data]; part = data[10:20]; other = bytes(len(data)); small = b"x" * 100
"""
    )
    assert trip.sent_bytes < SIZE + 20_000
    assert notebook["again"][0] is notebook["data"]
    assert notebook["other"] == bytes(SIZE)
    assert trip.home_bytes < SIZE + 20_000, "only `other` is new"
    assert notebook["part"] == bytes(range(10, 20))


def test_it_lies_in_memory_that_all_share(notebook: Notebook) -> None:
    notebook.run(f"data = b'x' * {SIZE}")
    notebook.cell(
        """
import ctypes
maps = [line.split() for line in open("/proc/self/maps")]
lies_in = next(parts for parts in maps if int(parts[0].split("-")[0], 16) <= id(data) < int(parts[0].split("-")[1], 16))
where = " ".join(lies_in)
"""
    )
    assert "taas-parcel" in notebook["where"]


def test_two_that_are_equal_stay_two(notebook: Notebook) -> None:
    notebook.run(f"one = b'x' * {SIZE}; two = bytes(bytearray(one))")
    notebook.cell("are_one = one is two; are_equal = one == two")
    assert (notebook["are_one"], notebook["are_equal"]) == (False, True)


def test_what_others_make_of_it_is_sent_too(notebook: Notebook) -> None:
    """Keys, members and arguments of constructors."""
    notebook.run(
        f"""
class Blob:
    def __init__(self, data): self.data = data
    def __reduce__(self): return Blob, (self.data,)
data = b"y" * {SIZE}; blob = Blob(data); table = {{data: "value"}}; members = frozenset([data])
"""
    )
    notebook.cell("blob2 = Blob(blob.data); facts = (blob.data is data, table[data], data in members)")
    assert notebook["facts"] == (True, "value", True)
    assert notebook["blob2"].data is notebook["data"]
    assert pickle.dumps(notebook["blob2"].data) == pickle.dumps(notebook["data"])
