"""Lightning with data that producers prepare: fit, validate, and what is seen of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process.kernel import Notebook, warm_notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEFINITIONS = """
import os
import pytorch_lightning as pl
import taas, torch
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    '''Points on a line, each with its number and the process that made it.'''

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.tensor([index / self.size, 1.0])
        return x, 3 * x[:1] - 1, index, os.getpid()


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)
        self.trained, self.validated, self.strangers = [], [], 0

    def loss(self, batch, seen):
        x, y, numbers, makers = batch
        seen.append((self.current_epoch, numbers.tolist()))
        self.strangers += (makers != os.getpid()).sum().item()
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, index):
        return self.loss(batch, self.trained)

    def validation_step(self, batch, index):
        self.log("error", self.loss(batch, self.validated), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="auto",
             enable_checkpointing=False, num_sanity_val_steps=0)
train = DataLoader(Points(64), batch_size=4, shuffle=True)
valid = DataLoader(Points(21), batch_size=4)
taas.register(train)
taas.register(valid, role="eval")
"""
FIT = """
module = Line()
trainer = pl.Trainer(devices=2, strategy="ddp", {limits}, **quiet)
trainer.fit(module, train, valid)
[module.trained, module.validated, module.strangers, trainer.global_step]
"""


@pytest.fixture(scope="module")
def notebook(private_temp: Path, started_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    project = tmp_path_factory.mktemp("lightning")
    (project / "taas.toml").write_text("[delivery]\nprocesses = 1\nprepare_s = 1.0\n")
    with warm_notebook(project) as notebook:
        notebook.run(DEFINITIONS, timeout=120).ok()
        notebook.await_preloaded()
        yield notebook


def fit(notebook: Notebook, limits: str, flags: str = "") -> list[Any]:
    """Fit on two ranks; what each of them saw."""
    source = f"#pragma taas --gpus 2 --cpus 1 --rank-results {flags}\n" + FIT.format(limits=limits)
    cell = notebook.run(source, timeout=120).ok()
    assert cell.result is not None
    seen: list[Any] = ast.literal_eval(cell.result)
    return seen


def value(notebook: Notebook, expression: str) -> Any:
    """What an expression is in the kernel; builtin values only."""
    result = notebook.run(expression).ok().result
    return None if result is None else ast.literal_eval(result)


def test_a_fit_sees_each_sample_once_an_epoch_and_validates_on_all(notebook: Notebook) -> None:
    ranks = fit(notebook, "max_epochs=3")
    for trained, validated, strangers, steps in ranks:
        assert len(trained) == steps == 3 * 8
        assert len(validated) == 3 * 3
        # All of it was made by producers.
        assert strangers == 3 * 8 * 4 + sum(len(numbers) for _, numbers in validated)
    for epoch in range(3):
        for seen, size in ((0, 64), (1, 21)):
            numbers = [number for rank in ranks for at, batch in rank[seen] for number in batch if at == epoch]
            assert sorted(numbers) == list(range(size))
    orders = [[numbers for at, numbers in ranks[0][0] if at == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert value(notebook, "trainer.callback_metrics['error'].item() < 0.3") is True
    assert value(notebook, "type(train) is DataLoader, len(train), len(list(valid))") == (True, 16, 6)
    assert value(notebook, "trainer.train_dataloader is train, trainer.current_epoch") == (True, 3)


def test_units_bound_a_fit(notebook: Notebook) -> None:
    for trained, validated, _, steps in fit(notebook, "max_epochs=-1, max_steps=20", "--units 40"):
        assert len(trained) == steps == 20
        assert len(validated) == 3
    assert value(notebook, "trainer.global_step") == 20


def test_validation_alone_uses_what_was_registered(notebook: Notebook) -> None:
    cell = notebook.run(
        "#pragma taas --gpus 2 --cpus 1 --rank-results\n"
        "module = Line()\n"
        "trainer = pl.Trainer(devices=2, strategy='ddp', **quiet)\n"
        "trainer.validate(module, valid, verbose=False)\n"
        "[sum((numbers for _, numbers in module.validated), []), module.strangers]",
        timeout=120,
    ).ok()
    assert "valid" in cell.stderr
    assert "train" not in cell.stderr
    (first, made), (second, made_too) = ast.literal_eval(cell.result or "")
    assert sorted(first + second) == list(range(21))
    assert made + made_too == 21


def test_a_fit_without_producers_is_the_notebooks_again(notebook: Notebook) -> None:
    source = "#pragma taas --gpus 2 --rank-results\n" + FIT.format(limits="max_epochs=1")
    ranks = ast.literal_eval(notebook.run(source, timeout=120).ok().result or "")
    for trained, _, strangers, steps in ranks:
        assert len(trained) == steps == 8
        assert strangers == 0
