"""Accelerate in pragma cells: its own launcher is not needed, and what it wraps comes home."""

from __future__ import annotations

from pathlib import Path

import pytest
from process.kernel import warm_notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEFINITIONS = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x.sum(1, keepdim=True) > 0).float()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
alias = model
"""

TRAINING = """
#pragma taas --gpus 2 --writes all
accelerator = Accelerator()
num_processes = accelerator.num_processes
net, prepared, batches = accelerator.prepare(model, optimizer, loader)
losses = []
for epoch in range(4):
    for a, b in batches:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(a), b)
        prepared.zero_grad()
        accelerator.backward(loss)
        prepared.step()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
seen = len(accelerator.gather_for_metrics(torch.cat([b for _, b in batches])))
weights = accelerator.gather(net.module.weight.detach())
accelerator.save_state("state")
"""


def test_accelerate_trains_over_all_ranks(tmp_path: Path) -> None:
    with warm_notebook(tmp_path) as notebook:
        notebook.run(DEFINITIONS).ok()
        notebook.run(TRAINING, timeout=120).ok()
        checks = {
            "num_processes": "2",
            "seen": "256",  # both shares of the data, so the ranks did not train on the same
            "torch.equal(*weights.chunk(2))": "True",  # and they averaged their gradients
            "losses[-1] < losses[0]": "True",
            "alias is model and net is model": "True",  # DDP's wrapper came home as the module in it
            "prepared.optimizer is optimizer": "True",
            "((model(x) > 0) == (y > 0)).float().mean().item() > 0.9": "True",
        }
        assert {expression: notebook.run(expression).ok().result for expression in checks} == checks
        # Each rank keeps a random state of its own, which is what --writes all is for.
        assert {"random_states_0.pkl", "random_states_1.pkl"} <= {path.name for path in (tmp_path / "state").iterdir()}

        notebook.run("trained = model.weight.detach().clone()\n_ = model.weight.data.zero_()").ok()
        notebook.run(
            "#pragma taas --gpus 2\n"
            "accelerator = Accelerator()\n"
            "net, prepared, batches = accelerator.prepare(model, optimizer, loader)\n"
            "accelerator.load_state('state')\n",
            timeout=120,
        ).ok()
        assert notebook.run("torch.equal(model.weight, trained)").ok().result == "True"
