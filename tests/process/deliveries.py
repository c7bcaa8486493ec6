"""Cells whose loaders are delivered, for tests: a notebook with what they need, and what each rank got."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from process.kernel import CellResult, Notebook, warm_notebook
from process.watch import await_condition, titled

SOON_S = 10.0
SETTINGS = {"processes": "1", "prepare_s": "0.5", "prepare_mib": "4"}
DEFINITIONS = """
import collections, dataclasses, importlib.util, itertools, os, random, signal, time
import numpy as np, taas, torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import TensorDataset, WeightedRandomSampler
from taas_magic.errors import PoisonElementError
class Numbers(Dataset):
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return index
class Noisy(Numbers):
    def __getitem__(self, index):
        return index, float(torch.rand(())), random.random(), float(np.random.rand())
class Where(Numbers):
    def __getitem__(self, index):
        return os.getpid()
class Parts(IterableDataset):
    '''Each worker has every so many numbers, with noise.'''
    def __init__(self, size):
        self.size = size
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(part, self.size, parts):
            yield number, part, parts, float(torch.rand(())), random.random()
class Endless:
    def __iter__(self): return itertools.count()
def plain(element):
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, element)
def lists(loader):
    return [plain(element) for element in loader]
def dealt(elements, ranks):
    '''What each rank gets of an epoch, where what makes no full round is dropped.'''
    whole = len(elements) - len(elements) % ranks
    return [elements[rank:whole:ranks] for rank in range(ranks)]
"""


def set_up(project: Path, **changes: str) -> None:
    """Write the settings beside the notebook; they hold from the next cell on."""
    lines = [f"{key} = {setting}" for key, setting in {**SETTINGS, **changes}.items()]
    (project / "taas.toml").write_text("\n".join(["[delivery]", *lines, ""]))


@contextlib.contextmanager
def started(directory: Path) -> Iterator[Notebook]:
    """A notebook in ``directory`` that knows :data:`DEFINITIONS`."""
    set_up(directory)
    with warm_notebook(directory) as notebook:
        notebook.run(DEFINITIONS).ok()
        yield notebook


@contextlib.contextmanager
def with_nothing_registered(kernel: Notebook) -> Iterator[Notebook]:
    """A notebook in which nothing is registered; afterwards no process of a delivery is left."""
    yield kernel
    set_up(kernel.directory)
    kernel.run("for each in taas.registered():\n    taas.unregister(each)").ok()
    await_condition(lambda: not of_deliveries(kernel), "the end of the producers", SOON_S)


def of_deliveries(notebook: Notebook) -> list[int]:
    kinds = ("taas: producer", "taas: coordinator", "taas: delivery")
    return [pid for kind in kinds for pid in titled(notebook.pid, kind)]


def deliver(notebook: Notebook, source: str, flags: str = "", *, num_ranks: int = 2, cpus: int = 1) -> CellResult:
    """Run a cell on ranks, with producers."""
    return notebook.run(f"#pragma taas --gpus {num_ranks} --cpus {cpus} {flags}\n{source}")


def of_ranks(notebook: Notebook, source: str, flags: str = "", *, num_ranks: int = 2, cpus: int = 1) -> list[Any]:
    """Run such a cell, and take the value of its last expression on each rank; it is ``_`` in the notebook."""
    result = deliver(notebook, source, f"--rank-results {flags}", num_ranks=num_ranks, cpus=cpus).ok().result
    assert result is not None
    values: list[Any] = ast.literal_eval(result)
    return values


def flat(batches: Iterable[list[Any]]) -> list[Any]:
    return [sample for batch in batches for sample in batch]
