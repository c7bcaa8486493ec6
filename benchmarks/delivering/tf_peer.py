"""The rate of the tf.data service, as a program of its own: a dispatcher here, and workers in processes beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")

import tensorflow as tf  # type: ignore[import-not-found, import-untyped, unused-ignore]

from delivering import workloads
from delivering.workloads import BATCH_SIZE, MANY, pace

_service = tf.data.experimental.service


def _dataset(measure: str) -> Any:
    numbers = tf.data.Dataset.range(MANY)
    if measure == "transform":
        # A Python function is found under its number in the process that calls it: the workers make this, too.
        samples = numbers.map(lambda index: tf.numpy_function(workloads.transform, [index], tf.float32))
        return samples.batch(BATCH_SIZE)
    element = tf.constant(workloads.block() if measure == "blocks" else workloads.small())
    return numbers.map(lambda _: element)


def _elements(measure: str, service: str) -> Iterable[Any]:
    # Every worker makes elements of its own, which costs less than to have each made by one of them only.
    distribute = _service.distribute(
        _service.ShardingPolicy.OFF, service, max_outstanding_requests=16, compression=None
    )
    elements: Iterable[Any] = _dataset(measure).apply(distribute).as_numpy_iterator()
    return elements


def _check(measure: str, element: Any) -> None:
    expected = {
        "blocks": (workloads.BLOCK_BYTES,),
        "transform": (BATCH_SIZE, 3, 224, 224),
        "small": (workloads.SMALL_BYTES,),
    }[measure]
    assert element.shape == expected, element.shape


def _work(measure: str, dispatcher: str) -> None:
    server = _service.WorkerServer(_service.WorkerConfig(dispatcher_address=dispatcher))
    dataset = _dataset(measure)
    server.join()
    del dataset


def main() -> None:
    if len(sys.argv) == 3:
        _work(*sys.argv[1:])
        return
    measure, num_processes, warm_s, window_s, out = sys.argv[1:]
    dispatcher = _service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    for _ in range(int(num_processes)):
        subprocess.Popen([sys.executable, "-m", "delivering.tf_peer", measure, address])
    elements = iter(_elements(measure, dispatcher.target))
    _check(measure, next(elements))
    Path(out).write_text(repr(pace(elements, float(warm_s), float(window_s))), encoding="utf-8")
    # What is left is ended from outside.
    os._exit(0)


if __name__ == "__main__":
    main()
