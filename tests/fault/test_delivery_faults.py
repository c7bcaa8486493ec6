"""Producers are killed and stopped at random moments: the stream is the same, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import CellResult, Notebook, warm_notebook
from process.watch import await_condition, await_gone, below, kill, only, title, titled

pytestmark = pytest.mark.process

SETUP = """
import hashlib, random, time
import numpy as np, torch, taas
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Noisy(Dataset):
    def __len__(self):
        return 82
    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.full((3,), float(index)), torch.rand(40), np.random.rand(), random.random()

class Parts(IterableDataset):
    def __iter__(self):
        part, parts = taas.get_worker_info()
        for index in range(part, 82, parts):
            time.sleep(0.003)
            yield torch.full((3,), float(index)), torch.rand(40), np.random.rand(), random.random()

def hash_of(element):
    return hashlib.sha256(b"".join(np.asarray(part, dtype=np.float64).tobytes() for part in element)).hexdigest()

torch.manual_seed(5)
seed = torch.Generator().manual_seed(11)
noisy = DataLoader(Noisy(), batch_size=2, shuffle=True, generator=seed)
parts = DataLoader(Parts(), batch_size=2, num_workers=3, generator=seed)
taas.register(noisy)
taas.register(parts)
"""
#: The notebook's generator moves with each run; what is compared has to begin alike.
ITERATE = """
import torch.distributed as dist
hashes = [hash_of(element) for element in {loader}]
if not dist.is_initialized():
    dist.init_process_group("gloo")
gathered = [None] * taas.world_size()
dist.all_gather_object(gathered, hashes)
steps = {{len(each) for each in gathered}}
stream = [each[step] for step in range(len(hashes)) for each in gathered]
print("stream", len(steps), len(stream), len(set(stream)), hashlib.sha256("".join(stream).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, private_temp: object, started_once: None) -> Iterator[Notebook]:
    directory = tmp_path_factory.mktemp("faults")
    (directory / "taas.toml").write_text("[delivery]\nprocesses = 2\nprepare_s = 0.05\n")
    with warm_notebook(directory) as notebook:
        notebook.run(SETUP).ok()
        notebook.await_preloaded()
        yield notebook


def begin(notebook: Notebook, loader: str, cpus: int, flags: str = "") -> None:
    notebook.run("seed.manual_seed(11)").ok()
    notebook.start(f"#pragma taas --gpus 2 --cpus {cpus} {flags}\n" + ITERATE.format(loader=loader))


def stream_of(cell: CellResult) -> str:
    return str(re.findall("stream (.*)", cell.ok().stdout)[0])


@pytest.fixture(scope="module")
def undisturbed(notebook: Notebook) -> dict[str, str]:
    streams = {}
    for loader in ("noisy", "parts"):
        begin(notebook, loader, 1)
        streams[loader] = stream_of(notebook.wait())
    return streams


def producers(notebook: Notebook) -> list[int]:
    return titled(notebook.pid, "taas: producer")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("loader", ["noisy", "parts"])
@pytest.mark.parametrize("cpus", [1, 2, 4])
def test_whatever_happens_to_producers_the_stream_is_the_same(
    notebook: Notebook, undisturbed: dict[str, str], loader: str, cpus: int
) -> None:
    source = random.Random(f"{loader} {cpus}")
    rounds = 34
    for number in range(rounds):
        begin(notebook, loader, cpus)
        await_condition(lambda: bool(producers(notebook)), "producers")
        # What ends three producers counts as the cause of that; with two no element can.
        for _ in range(source.randint(1, 2)):
            select.select([], [], [], source.random() * 0.12)
            found = producers(notebook)
            if found:
                # Stopped ones are noticed after a while: a few of them tell as much as many.
                number_of_signal = signal.SIGSTOP if number % 8 == 7 else signal.SIGKILL
                with contextlib.suppress(ProcessLookupError):
                    os.kill(source.choice(found), number_of_signal)
        assert stream_of(notebook.wait()) == undisturbed[loader], f"round {number}"


def test_the_stream_has_every_element_once(undisturbed: dict[str, str]) -> None:
    # 41 batches make 20 rounds; three parts have 14 batches each.
    assert undisturbed["noisy"].startswith("1 40 40 ")
    assert undisturbed["parts"].startswith("1 42 42 ")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_coordinator_ends_the_run_with_an_error(notebook: Notebook, how: signal.Signals) -> None:
    notebook.start(
        "#pragma taas --gpus 2 --cpus 1\nfor element in noisy:\n    print('step', flush=True)\n    time.sleep(0.2)"
    )
    notebook.wait_for_output("step")
    os.kill(only(titled(notebook.pid, "taas: coordinator")), how)
    cell = notebook.wait(10)
    assert cell.status == "error"
    assert "coordinator" in cell.error_value
    assert cell.seconds < 8
    notebook.run("1").ok()


def test_a_killed_rank_leaves_nothing_of_the_delivery(notebook: Notebook) -> None:
    notebook.start(
        "#pragma taas --gpus 2 --cpus 1\nfor element in noisy:\n    print('step', flush=True)\n    time.sleep(0.1)"
    )
    notebook.wait_for_output("step")
    processes = delivery_processes(notebook)
    kill(only(titled(notebook.pid, "taas: rank 1")))
    assert notebook.wait().error_name == "RankDiedError"
    await_gone(processes, 5)


def test_stop_leaves_nothing_of_the_delivery(notebook: Notebook) -> None:
    notebook.start(
        "#pragma taas --gpus 2 --cpus 1\nfor element in noisy:\n    print('step', flush=True)\n    time.sleep(0.1)"
    )
    notebook.wait_for_output("step")
    processes = delivery_processes(notebook)
    notebook.interrupt()
    assert notebook.wait().error_name == "KeyboardInterrupt"
    await_gone(processes, 5)


def test_a_killed_kernel_leaves_nothing_of_the_delivery(tmp_path: Path) -> None:
    with warm_notebook(tmp_path) as notebook:
        notebook.run(SETUP).ok()
        notebook.start(
            "#pragma taas --gpus 2 --cpus 1\nfor element in noisy:\n    print('step', flush=True)\n    time.sleep(0.1)"
        )
        notebook.wait_for_output("step")
        processes = delivery_processes(notebook)
        everything = below(notebook.pid)
        kill(notebook.pid)
        await_gone([*processes, *everything], 10)


def delivery_processes(notebook: Notebook) -> list[int]:
    found = [
        pid for pid in below(notebook.pid) if title(pid).startswith(("taas: producer", "taas: coord", "taas: deliv"))
    ]
    assert len(found) >= 4
    return found
