"""Delivery to a rank with a GPU: elements that lie in pinned memory, and loaders that producers cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.test_cuda import NUM_GPUS
from process.kernel import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="torch sees no CUDA device here")]

SETUP = """
import numpy as np, torch, taas
from torch.utils.data import DataLoader, TensorDataset

values = torch.arange(64 * 3 * 64 * 64, dtype=torch.float32).reshape(64, 3, 64, 64)
pinned = DataLoader(TensorDataset(values), batch_size=8, pin_memory=True)
small = DataLoader(TensorDataset(torch.arange(64)), batch_size=8, pin_memory=True)
plain = DataLoader(TensorDataset(values), batch_size=8)
for loader in (pinned, small, plain):
    taas.register(loader)
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    directory: Path = tmp_path_factory.mktemp("project")
    (directory / "taas.toml").write_text("[delivery]\nprocesses = 2\n")
    with Notebook(directory, extension=True) as started:
        started.run(SETUP).ok()
        yield started


def test_elements_lie_in_pinned_memory_and_reach_the_gpu_whole(notebook: Notebook) -> None:
    notebook.run(
        """#pragma taas --gpus 1 --cpus 1
on_gpu = []
is_pinned = []
for (batch,) in plain:
    assert not batch.is_pinned()
    break
for loader in (pinned, small):
    for (batch,) in loader:
        is_pinned.append(batch.is_pinned())
        on_gpu.append(batch.to("cuda", non_blocking=True))
torch.cuda.synchronize()
images = torch.cat(on_gpu[:8]).cpu()
numbers = torch.cat(on_gpu[8:]).cpu()
"""
    ).ok()
    assert notebook.run("all(is_pinned), len(is_pinned)").ok().result == "(True, 16)"
    assert (
        notebook.run("torch.equal(images, values), torch.equal(numbers, torch.arange(64))").ok().result
        == "(True, True)"
    )


def test_a_loader_over_memory_of_a_gpu_is_refused_with_the_path_to_it(notebook: Notebook) -> None:
    notebook.run("over_gpu = DataLoader(TensorDataset(values.cuda()), batch_size=8)").ok()
    cell = notebook.run("taas.register(over_gpu)")
    assert cell.error_name == "CannotTravelError"
    assert "over_gpu.dataset.tensors[0]" in cell.error_value
    assert "producers have no GPU" in cell.error_value


def test_producers_leave_the_gpu_alone(notebook: Notebook) -> None:
    notebook.run(
        """
class Asks(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.cuda.is_initialized()
asks = DataLoader(Asks())
taas.register(asks)
"""
    ).ok()
    notebook.run("#pragma taas --gpus 1 --cpus 1\nanswers = [bool(answer) for answer in asks]").ok()
    assert notebook.run("answers").ok().result == "[False, False, False, False]"
