"""Both ways of elements to the ranks, shared memory and a connection, keep the same contract."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import Notebook, warm_notebook
from process.watch import await_condition, kill, titled

from taas_magic.data.transports import Listener

SETUP = """
import hashlib, time
import numpy as np, torch, taas
from torch.utils.data import DataLoader, Dataset

class Sizes(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        time.sleep(0.002)
        # From nothing to some megabytes, so that room that was set aside is often too little.
        size = [0, 3, 1000, 70_000, 900_000][index % 5]
        values, array = torch.rand(size), np.random.rand(size // 10)
        return {"index": index, "values": values, "text": "x" * (index % 7), "array": array}

def hash_of(element):
    parts = [np.asarray(element[name]).tobytes() for name in ("values", "array")] + [element["text"].encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()

generator = torch.Generator().manual_seed(3)
sizes = DataLoader(Sizes(), batch_size=None, shuffle=True, generator=generator)
taas.register(sizes)
"""
ITERATE = """
indices, hashes = [], []
for element in sizes:
    indices.append(int(element["index"]))
    hashes.append(hash_of(element))
"""


@pytest.fixture(scope="module", params=["shared", "tcp"])
def notebook(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, private_temp: object, started_once: None
) -> Iterator[Notebook]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    (directory / "taas.toml").write_text(
        f'[delivery]\nprocesses = 2\nprepare_s = 0.05\nmemory_mib = 16\ntransport = "{request.param}"\n'
    )
    with warm_notebook(directory) as notebook:
        notebook.run(SETUP).ok()
        notebook.await_preloaded()
        yield notebook


def stream(notebook: Notebook) -> str:
    result = notebook.run("hash(tuple(indices)), hashlib.sha256(''.join(hashes).encode()).hexdigest()").ok().result
    assert result is not None
    return result


#: What the first transport gave, for the others to be compared with.
_streams: list[str] = []


def test_elements_of_all_sizes_come_whole_and_alike(notebook: Notebook) -> None:
    notebook.run("generator.manual_seed(3)").ok()
    notebook.run("#pragma taas --gpus 1 --cpus 1\n" + ITERATE).ok()
    assert notebook.run("sorted(indices) == list(range(60))").ok().result == "True"
    _streams.append(stream(notebook))
    assert len(set(_streams)) == 1


def test_a_producer_that_is_killed_in_the_midst_changes_nothing(notebook: Notebook) -> None:
    for _ in range(5):
        notebook.run("generator.manual_seed(3)").ok()
        notebook.start("#pragma taas --gpus 1 --cpus 1\n" + ITERATE)
        await_condition(lambda: bool(titled(notebook.pid, "taas: producer")), "producers")
        for pid in titled(notebook.pid, "taas: producer")[:2]:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        notebook.wait().ok()
        assert notebook.run("sorted(indices) == list(range(60))").ok().result == "True"
        _streams.append(stream(notebook))
    assert len(set(_streams)) == 1


def test_what_a_data_set_raises_comes_with_its_type(notebook: Notebook) -> None:
    notebook.run(
        """
class Picky(Exception):
    pass
class Raises(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        if index == 4:
            raise Picky("not this one")
        return index
raising = DataLoader(Raises(), batch_size=None)
taas.register(raising)
"""
    ).ok()
    cell = notebook.run("#pragma taas --gpus 1 --cpus 1\nseen = []\nfor number in raising:\n    seen.append(number)")
    assert (cell.error_name, cell.error_value.splitlines()[0]) == ("Picky", "not this one")
    assert "made of 4" in cell.traceback_text
    assert notebook.run("seen").ok().result == "[0, 1, 2, 3]"


# ---- who may connect


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(b"s" * 32)
    yield listener
    listener.close()


def connect(listener: Listener, greeting: bytes) -> socket.socket:
    host, _, port = listener.address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(greeting)
    return sock


def test_who_knows_the_secret_is_taken_for_the_producer_that_it_says(listener: Listener) -> None:
    with connect(listener, b"s" * 32 + struct.pack("<I", 7)):
        accepted = listener.accept()
        assert accepted is not None
        producer, sock = accepted
        sock.close()
    assert producer == 7


@pytest.mark.parametrize(
    "greeting", [b"", b"s" * 32, b"s" * 31 + b"t" + bytes(4), os.urandom(36), b"GET / HTTP/1.1\r\n\r\n" + bytes(40)]
)
def test_nobody_else_is_listened_to(listener: Listener, greeting: bytes) -> None:
    sock = connect(listener, greeting)
    if len(greeting) < 36:
        sock.shutdown(socket.SHUT_WR)
    assert listener.accept() is None
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    sock.close()


def test_it_listens_to_this_machine_alone(listener: Listener) -> None:
    assert listener.address.startswith("127.0.0.1:")
