"""DataLoaders over the workloads. As a program: the rate of a plain DataLoader with workers of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from delivering import workloads
from delivering.workloads import BATCH_SIZE, MANY, pace


class _Many(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return MANY


class Blocks(_Many):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(workloads.block())


class Small(_Many):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(workloads.small())


class Read(_Many):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(workloads.read(index))


class Transformed(_Many):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(workloads.transform(index))


_DATASETS: dict[str, tuple[type[_Many], int | None]] = {
    "blocks": (Blocks, None),
    "transform": (Transformed, BATCH_SIZE),
    "storage": (Read, None),
    "tcp": (Blocks, None),
    "small": (Small, None),
}


def loader_for(measure: str, num_workers: int = 0) -> DataLoader[Any]:
    """The loader of a measure."""
    kind, batch_size = _DATASETS[measure]
    return DataLoader(kind(), batch_size=batch_size, num_workers=num_workers)


def main() -> None:
    measure, num_workers, warm_s, window_s, out = sys.argv[1:]
    rate = pace(loader_for(measure, int(num_workers)), float(warm_s), float(window_s))
    Path(out).write_text(repr(rate), encoding="utf-8")


if __name__ == "__main__":
    main()
