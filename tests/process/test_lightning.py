"""Lightning in pragma cells: every entry point of the Trainer, and what of it is in the notebook afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process.kernel import Notebook, warm_notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEFINITIONS = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(0)
digits = load_digits()
X, Y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train = DataLoader(TensorDataset(X[:1440], Y[:1440]), batch_size=32, shuffle=True)
held_out = DataLoader(TensorDataset(X[1440:], Y[1440:]), batch_size=32)


class Classifier(pl.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, index):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.005)


class Seen(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.current_epoch)


def accuracy(module):
    with torch.no_grad():
        return (module(X[1440:]).argmax(1) == Y[1440:]).float().mean().item()


quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="auto")
"""


@pytest.fixture(scope="module")
def notebook(private_temp: Path, started_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with warm_notebook(tmp_path_factory.mktemp("lightning")) as notebook:
        notebook.run(DEFINITIONS).ok()
        yield notebook


def value(notebook: Notebook, expression: str) -> Any:
    """What an expression is in the kernel; builtin values only."""
    result = notebook.run(expression).ok().result
    return None if result is None else ast.literal_eval(result)


def test_the_module_that_ddp_has_trained_is_the_notebooks(notebook: Notebook) -> None:
    notebook.run("module, seen = Classifier(), Seen()\nbefore, alias = id(module.net[0].weight), module").ok()
    fitted = notebook.run(
        "#pragma taas --gpus 2\n"
        "checkpoint = ModelCheckpoint('best', monitor='accuracy', mode='max')\n"
        "trainer = pl.Trainer(devices=2, strategy='ddp', max_epochs=4, callbacks=[seen, checkpoint], **quiet)\n"
        "trainer.fit(module, train, held_out)\n",
        timeout=120,
    ).ok()
    assert "stayed on rank 0" not in fitted.stderr
    assert "Warning" not in fitted.stderr.replace("UserWarning", "")
    assert value(notebook, "alias is module, id(module.net[0].weight) == before") == (True, True)
    assert value(notebook, "type(module) is Classifier, module.hparams.width") == (True, 64)
    assert value(notebook, "accuracy(module)") > 0.85
    assert value(notebook, "seen.epochs, trainer.current_epoch, trainer.global_step") == ([0, 1, 2, 3], 4, 4 * 23)
    assert value(notebook, "trainer.callback_metrics['accuracy'].item()") > 0.85
    assert value(notebook, "trainer.lightning_module is module, trainer.model is module") == (True, True)
    # The file that rank 0's callback wrote holds what the callback in the notebook says.
    assert value(notebook, "trainer.checkpoint_callback is checkpoint") is True
    best = "Classifier.load_from_checkpoint(checkpoint.best_model_path)"
    assert value(notebook, f"abs(accuracy({best}) - checkpoint.best_model_score.item()) < 0.02") is True


def test_a_second_fit_goes_on_where_the_first_stopped(notebook: Notebook) -> None:
    notebook.run("module, seen = Classifier(), Seen()").ok()
    notebook.run(
        "#pragma taas --gpus 2\n"
        "trainer = pl.Trainer(devices=2, strategy='ddp', max_epochs=1, callbacks=[seen],\n"
        "                     enable_checkpointing=False, **quiet)\n"
        "trainer.fit(module, train)\n",
        timeout=120,
    ).ok()
    notebook.run("first = [p.clone() for p in module.parameters()]\ntrainer.fit_loop.max_epochs = 3").ok()
    notebook.run("#pragma taas --gpus 2\ntrainer.fit(module, train)", timeout=120).ok()
    assert value(notebook, "seen.epochs, trainer.global_step") == ([0, 1, 2], 3 * 23)
    assert value(notebook, "any(torch.equal(a, b) for a, b in zip(first, module.parameters()))") is False


def test_strategy_auto_validates_tests_and_predicts(notebook: Notebook) -> None:
    notebook.run("module = Classifier()").ok()
    notebook.run(
        "#pragma taas --gpus 2\n"
        "trainer = pl.Trainer(devices=2, strategy='auto', max_epochs=3, enable_checkpointing=False, **quiet)\n"
        "trainer.fit(module, train)\n"
        "world = trainer.world_size, type(trainer.strategy).__name__\n"
        "validated = trainer.validate(module, held_out, verbose=False)\n"
        "tested = trainer.test(module, held_out, verbose=False)\n"
        "predicted = trainer.predict(module, held_out)\n",
        timeout=120,
    ).ok()
    assert value(notebook, "world") == (2, "DDPStrategy")
    assert value(notebook, "validated == tested, abs(tested[0]['accuracy'] - accuracy(module)) < 0.02") == (True, True)
    # Rank 0's share: every second example, padded to equal shares.
    assert value(notebook, "len(torch.cat(predicted))") == (1797 - 1440 + 1) // 2
    assert value(notebook, "torch.equal(torch.cat(predicted), module(X[1440::2]).argmax(1))") is True


def test_a_stopped_fit_leaves_the_model_in_the_notebook(notebook: Notebook) -> None:
    notebook.run("module = Classifier()\nuntrained = [p.clone() for p in module.parameters()]").ok()
    notebook.start(
        "#pragma taas --gpus 2\n"
        "class Tell(Callback):\n"
        "    def on_train_epoch_end(self, trainer, module):\n"
        "        print('epoch', trainer.current_epoch, flush=True)\n"
        "trainer = pl.Trainer(devices=2, strategy='ddp', max_epochs=100_000, callbacks=[Tell()],\n"
        "                     enable_checkpointing=False, **quiet)\n"
        "trainer.fit(module, train)\n"
    )
    notebook.wait_for_output("epoch 2", timeout=120)
    notebook.interrupt()
    stopped = notebook.wait(timeout=60)
    assert stopped.status == "error"
    assert stopped.error_name == "KeyboardInterrupt"
    # Lightning puts another `forward` in place for a step, and an interrupt just there leaves it, in a plain cell too.
    notebook.run("vars(module).pop('forward', None)").ok()
    assert value(notebook, "accuracy(module) > 0.5") is True
    assert value(notebook, "any(torch.equal(a, b) for a, b in zip(untrained, module.parameters()))") is False
    assert value(notebook, "trainer.current_epoch >= 2") is True


def test_an_error_in_a_step_is_the_cells_error(notebook: Notebook) -> None:
    failed = notebook.run(
        "#pragma taas --gpus 2\n"
        "class Failing(Classifier):\n"
        "    def training_step(self, batch, index):\n"
        "        if index == 3 and self.global_rank == 1:\n"
        "            raise ValueError('bad batch')\n"
        "        return super().training_step(batch, index)\n"
        "trainer = pl.Trainer(devices=2, strategy='ddp', max_epochs=1, enable_checkpointing=False, **quiet)\n"
        "trainer.fit(Failing(), train)\n",
        timeout=120,
    )
    assert (failed.error_name, failed.error_value) == ("ValueError", "bad batch")
    assert "raise ValueError('bad batch')" in failed.traceback_text
    assert "[rank 1]" in failed.traceback_text
