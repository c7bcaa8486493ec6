"""What only a machine with a GPU can show: NCCL, CUDA tensors in both directions, a rank's own device.

Run with ``pytest -m gpu tests/gpu``; skipped where torch sees no CUDA device.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import Notebook


def _num_gpus() -> int:
    """Counted in a process of its own, so that this one stays without CUDA."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


NUM_GPUS = _num_gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="torch sees no CUDA device here")]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    directory: Path = tmp_path_factory.mktemp("project")
    with Notebook(directory) as started:
        started.run("%load_ext taas_magic")
        yield started


def test_nccl_reduces_over_all_gpus(notebook: Notebook) -> None:
    result = notebook.run(
        f"""#pragma taas --gpus {NUM_GPUS}
import torch, torch.distributed as dist, taas
dist.init_process_group("nccl", init_method="env://")
total = torch.ones(1, device="cuda") * (taas.rank() + 1)
dist.all_reduce(total)
backend, device = dist.get_backend(), str(total.device)
total = total.item()
"""
    )
    assert result.status == "ok", result.traceback_text
    expected = NUM_GPUS * (NUM_GPUS + 1) / 2
    assert notebook.run("(backend, device, total)").result == repr(("nccl", "cuda:0", expected))


def test_cuda_alone_is_the_ranks_own_gpu(notebook: Notebook) -> None:
    result = notebook.run(
        f"""#pragma taas --gpus {NUM_GPUS} --show all
import torch, taas
assert torch.zeros(1, device="cuda").device.index == taas.rank()
assert torch.zeros(1).cuda().device == taas.device()
print("fits")
"""
    )
    assert result.status == "ok", result.traceback_text
    assert result.stdout.count("fits") == NUM_GPUS


def test_cuda_tensors_travel_and_are_changed_in_place(notebook: Notebook) -> None:
    notebook.run("import torch\nw = torch.arange(4.0, device='cuda')\nalias = w\nhalf = w[2:]")
    result = notebook.run("#pragma taas --gpus 1\nassert w.is_cuda and half.is_cuda\nw += 1\nnew = w * 2")
    assert result.status == "ok", result.traceback_text
    assert notebook.run("alias is w, w.tolist(), new.tolist(), w.is_cuda").result == repr(
        (True, [1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], True)
    )


def test_a_model_that_the_cell_moved_comes_home_trained(notebook: Notebook) -> None:
    notebook.run(
        "model = torch.nn.Linear(2, 1)\nopt = torch.optim.Adam(model.parameters())\nbefore = model.weight.clone()"
    )
    result = notebook.run(
        """#pragma taas --gpus 1
import taas
model.to(taas.device())
model(torch.ones(3, 2, device="cuda")).sum().backward()
opt.step()
"""
    )
    assert result.status == "ok", result.traceback_text
    check = "opt.param_groups[0]['params'][0] is model.weight and not torch.equal(model.weight.cpu(), before)"
    assert notebook.run(check).result == "True"


def test_a_kernel_without_cuda_gets_cpu_tensors(tmp_path: Path) -> None:
    with Notebook(tmp_path) as other:
        other.run("%load_ext taas_magic\n")
        other.run("#pragma taas --gpus 1\npass")
        # The runner counted its GPUs already; the kernel itself now sees none.
        other.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; import torch; torch.cuda.is_available()")
        other.run("os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
        result = other.run("#pragma taas --gpus 1\nimport torch\nmade = torch.ones(2, device='cuda')")
        assert result.status == "ok", result.traceback_text
        assert other.run("str(made.device), made.tolist()").result == repr(("cpu", [1.0, 1.0]))
