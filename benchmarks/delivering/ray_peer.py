"""The rate of Ray Data, as a program of its own: a range, mapped, and one part of ``streaming_split``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import ray  # type: ignore[import-not-found, unused-ignore]

from delivering import workloads
from delivering.workloads import BATCH_SIZE, MANY, pace

Columns = dict[str, Any]


def _block(batch: Columns) -> Columns:
    return {"data": workloads.block()[None]}


def _small(row: Columns) -> Columns:
    return {"data": workloads.small()}


def _transform(row: Columns) -> Columns:
    return {"data": workloads.transform(int(row["id"]))}


def _elements(measure: str) -> Iterable[Any]:
    numbers = ray.data.range(MANY)
    if measure == "blocks":
        # A batch is the element, and holds one row; of what there is to choose, this was the fastest.
        return _part(numbers.map_batches(_block, batch_size=1, batch_format="numpy"), batch_size=1)
    if measure == "transform":
        return _part(numbers.map(_transform), batch_size=BATCH_SIZE)
    if measure == "small":
        return _part(numbers.map(_small), batch_size=1)
    assert measure == "small-rows"
    rows: Iterable[Any] = numbers.map(_small).streaming_split(1)[0].iter_rows()
    return rows


def _part(dataset: Any, batch_size: int) -> Iterable[Any]:
    part = dataset.streaming_split(1)[0]
    batches: Iterable[Any] = part.iter_batches(batch_size=batch_size, batch_format="numpy", prefetch_batches=4)
    return batches


def _check(measure: str, element: Columns) -> None:
    expected = {
        "blocks": (1, workloads.BLOCK_BYTES),
        "transform": (BATCH_SIZE, 3, 224, 224),
        "small": (1, workloads.SMALL_BYTES),
        "small-rows": (workloads.SMALL_BYTES,),
    }[measure]
    assert np.shape(element["data"]) == expected, np.shape(element["data"])


def main() -> None:
    measure, num_processes, warm_s, window_s, out = sys.argv[1:]
    ray.init(
        num_cpus=int(num_processes),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=2 * 2**30,
        _temp_dir=str(Path(out).parent / "ray"),
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    elements = iter(_elements(measure))
    _check(measure, next(elements))
    Path(out).write_text(repr(pace(elements, float(warm_s), float(window_s))), encoding="utf-8")
    # What is left is ended from outside.
    os._exit(0)


if __name__ == "__main__":
    main()
