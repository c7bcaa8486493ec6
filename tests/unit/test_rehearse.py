"""Code for NCCL and GPUs on CPU ranks: real groups of two processes, which run this file as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taas_magic.client.session import Place
from taas_magic.rank import rehearse

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0
NUM_RANKS = 2

# ---- what each rank does; a check is a function that asserts


def _sums_ranks(group: Any = None) -> None:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 1.0
    assert dist.get_backend(group) == "gloo"


def _starts(*args: Any, **kwargs: Any) -> Callable[[], None]:
    """A check that the default group starts with these arguments, and works."""

    def check() -> None:
        import torch.distributed as dist

        dist.init_process_group(*args, **kwargs)
        _sums_ranks()

    return check


def _cuda(index: int) -> Any:
    import torch

    return torch.device("cuda", index)


def _starts_at_cuda(**kwargs: Any) -> Callable[[], None]:
    return lambda: _starts(device_id=_cuda(int(os.environ["RANK"])), **kwargs)()


def _starts_with_nccl_options() -> None:
    # The name is what tells the options of NCCL, whose class a torch without CUDA doesn't have.
    options = type("Options", (), {"__qualname__": "ProcessGroupNCCL.Options"})()
    _starts("nccl", pg_options=options)()


def _starts_under_an_early_name() -> None:
    EARLY["init_process_group"]("nccl")
    _sums_ranks()


def _starts_under_the_inner_name() -> None:
    from torch.distributed import distributed_c10d

    distributed_c10d.init_process_group(backend=distributed_c10d.Backend.NCCL)
    _sums_ranks()


def _refuses_twice() -> None:
    import torch.distributed as dist

    _starts("nccl")()
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("nccl")
    with pytest.raises(TypeError, match="no_such_argument"):
        dist.init_process_group("nccl", no_such_argument=1)  # type: ignore[call-arg]  # the mistake is under test


def _refuses_an_unknown_backend() -> None:
    import torch.distributed as dist

    with pytest.raises(Exception, match="SUCH"):
        dist.init_process_group("cpu:such,cuda:nccl")


def _makes_groups() -> None:
    import torch.distributed as dist

    _starts("nccl")()
    _sums_ranks(dist.new_group([0, 1], backend="nccl"))
    _sums_ranks(dist.new_group([0, 1], None, "NCCL"))
    _sums_ranks(dist.new_group(backend="cpu:gloo,cuda:nccl", device_id=_cuda(0)))
    _sums_ranks(dist.new_group())
    _sums_ranks(dist.new_subgroups(2, backend="nccl")[0])
    _sums_ranks(dist.new_subgroups_by_enumeration([[0, 1]], backend="nccl")[0])


def _makes_meshes() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    for mesh in (
        init_device_mesh("cuda", (2,), mesh_dim_names=("dp",)),  # starts the default group as well
        init_device_mesh(device_type="cuda", mesh_shape=(2,), backend_override={0: "nccl"}),
        DeviceMesh("cuda", [0, 1]),
        DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda"),
        EARLY["init_device_mesh"]("cpu", (2,)),
    ):
        assert mesh.device_type == "cpu"
        _sums_ranks(mesh.get_group())
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("pp", "dp"))
    _sums_ranks(mesh["dp"].get_group())


def _shards_on_a_mesh() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (2,))
    tensor: Any = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert tensor.to_local().shape == (2,)
    assert tensor.sum().full_tensor().item() == 6.0


def _replicates() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _starts("nccl")()
    rank = dist.get_rank()
    devices = {"device_ids": [rank], "output_device": rank}
    for arguments in ({}, {"device_ids": None}, {"device_ids": [rank]}, devices):
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Linear(2, 1), **arguments)
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert model.module.weight.grad.tolist() == [[0.5, 0.5]]  # the mean of both ranks' gradients
    positional = DistributedDataParallel(torch.nn.Linear(2, 1), [rank], rank)
    assert positional.device_ids is None
    with pytest.raises(ValueError, match="single element"):
        DistributedDataParallel(torch.nn.Linear(2, 1), device_ids=[0, 1])


def _reduces_like_nccl() -> None:
    import torch
    import torch.distributed as dist

    _starts("nccl")()
    rank, average = dist.get_rank(), dist.ReduceOp.AVG

    def ones() -> Any:
        return torch.ones(2) * (rank + 1)

    tensor = ones()
    dist.all_reduce(tensor, op=average)
    assert tensor.tolist() == [1.5, 1.5]
    tensor = ones()
    dist.reduce(tensor, 0, average)
    assert rank != 0 or tensor.tolist() == [1.5, 1.5]
    tensor = torch.empty(1)
    dist.reduce_scatter_tensor(tensor, ones(), average)
    assert tensor.tolist() == [1.5]
    dist.reduce_scatter(tensor, list(ones().split(1)), average)
    assert tensor.tolist() == [1.5]
    tensor = torch.empty(4)
    dist.all_gather_into_tensor(tensor, ones())
    assert tensor.tolist() == [1, 1, 2, 2]
    tensor = torch.empty(2)
    dist.all_to_all_single(tensor, ones())
    assert tensor.tolist() == [1, 2]
    tensors = [torch.empty(1), torch.empty(1)]
    dist.all_to_all(tensors, list(ones().split(1)))
    assert [each.item() for each in tensors] == [1, 2]
    half = ones().bfloat16()
    dist.all_reduce(half, op=average)
    assert half.tolist() == [1.5, 1.5]
    dist.barrier(device_ids=[rank])
    dist.barrier()
    dist.monitored_barrier()


def _says_what_is_available() -> None:
    import torch.distributed as dist

    assert dist.is_nccl_available()
    assert dist.get_default_backend_for_device("cuda") == "gloo"
    assert dist.get_default_backend_for_device(_cuda(0)) == "gloo"
    assert dist.get_default_backend_for_device("cpu") == "gloo"


def _is_installed_once() -> None:
    import inspect

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    before = dist.init_process_group, dist.new_group, DistributedDataParallel.__init__
    rehearse.install()
    assert (dist.init_process_group, dist.new_group, DistributedDataParallel.__init__) == before
    assert dist.init_process_group.__name__ == "init_process_group"
    assert inspect.signature(dist.init_process_group) == EARLY["signature"]


CHECKS: dict[str, Callable[[], None]] = {
    "nccl": _starts("nccl"),
    "NCCL": _starts(backend="NCCL", init_method="env://"),
    "cpu and cuda": _starts("cpu:gloo,cuda:nccl"),
    "cuda and cpu": _starts("cuda:nccl,cpu:gloo"),
    "cuda": _starts("cuda:nccl"),
    "gloo": _starts("gloo"),
    "none": _starts(),
    "none at cuda": _starts_at_cuda(),
    "nccl at cuda": _starts_at_cuda(backend="nccl"),
    "nccl at a number": _starts("nccl", device_id=0),
    "nccl options": _starts_with_nccl_options,
    "imported early": _starts_under_an_early_name,
    "inner name": _starts_under_the_inner_name,
    "wrong calls": _refuses_twice,
    "unknown backend": _refuses_an_unknown_backend,
    "groups": _makes_groups,
    "meshes": _makes_meshes,
    "sharded tensor": _shards_on_a_mesh,
    "replicas": _replicates,
    "collectives": _reduces_like_nccl,
    "availability": _says_what_is_available,
    "installed once": _is_installed_once,
}

#: Names as a library has them that was imported before the rehearsal began.
EARLY: dict[str, Any] = {}


def _run_checks(rank: int) -> None:
    """Run all checks and print what failed as JSON. Rank 0 hosts the stores; the port of the first is printed."""
    import inspect
    import traceback
    import types

    import torch.distributed as dist

    def host() -> Any:
        return dist.TCPStore("127.0.0.1", 0, NUM_RANKS, is_master=True, wait_for_workers=False)

    if rank == 0:
        ports = host()
        print(ports.port, flush=True)
    else:
        ports = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), NUM_RANKS, is_master=False)
    library = types.ModuleType("library")
    exec("from torch.distributed import init_process_group, init_device_mesh", library.__dict__)
    sys.modules["library"] = library
    EARLY["signature"] = inspect.signature(dist.init_process_group)
    rehearse.install()
    EARLY.update(vars(library))
    failures, stores = {}, []
    for name, check in CHECKS.items():
        if rank == 0:  # each check has a store of its own: the keys of an ended group would confuse the next
            stores.append(host())
            ports.set(name, str(stores[-1].port))
        os.environ["MASTER_PORT"] = ports.get(name).decode()
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
    print(json.dumps(failures), flush=True)
    sys.stdin.read()  # rank 0 has the stores: stay until all are done


# ---- errors, as torch and others raise them


def _load_what_was_saved_from_a_gpu() -> None:
    import io

    import torch

    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    torch.load(file)


TRIGGERS = {
    "set_device": "torch.cuda.set_device(0)",
    "current_device": "torch.cuda.current_device()",
    "cuda method": "torch.nn.Linear(1, 1).cuda()",
    "to cuda": "torch.ones(1).to('cuda')",
    "to a number": "torch.ones(1).to(0)",
    "factory": "torch.zeros(1, device='cuda:1')",
    "device context": "torch.cuda.device(0).__enter__()",
    "event": "torch.cuda.Event()",
    "stream": "torch.cuda.Stream()",
    "synchronize": "torch.cuda.synchronize()",
    "memory": "torch.cuda.reset_peak_memory_stats()",
    "generator": "torch.Generator(device='cuda')",
    "pin_memory": "torch.ones(1).pin_memory()",
    "cuda tensor type": "torch.cuda.FloatTensor(2)",
    "nvtx": "torch.cuda.nvtx.range_push('step')",
    "nccl version": "torch.cuda.nccl.version()",
    "nccl class": "torch.distributed.ProcessGroupNCCL.Options()",
    "nccl import": "from torch.distributed import ProcessGroupNCCL",
    "nccl not answered": "torch.distributed.init_process_group('nccl', store=store, rank=0, world_size=1)",
    "checkpoint of a GPU": "load()",
    "sync batch norm": "gloo(); torch.nn.SyncBatchNorm(2)(torch.ones(2, 2))",
    "fsdp": "from torch.distributed.fsdp import FullyShardedDataParallel as F; F(torch.nn.Linear(1, 1))",
    "lightning gpu": "from pytorch_lightning import Trainer; Trainer(accelerator='gpu', devices=1)",
    "lightning cuda": "from pytorch_lightning import Trainer; Trainer(accelerator='cuda', devices=1)",
    "fabric": "from lightning_fabric import Fabric; Fabric(accelerator='gpu')",
}
UNRELATED = {
    "shape": "torch.ones(2) + torch.ones(3)",
    "missing attribute": "torch.cuda.no_such_name",
    "missing in torch._C": "torch._C.no_such_name",
    "missing module": "import no_such_module",
    "no group": "torch.distributed.get_rank()",
    "wrong checkpoint": "torch.load('/no/such/file')",
    "lightning": "from pytorch_lightning import Trainer; Trainer(accelerator='no such')",
}


def _trigger_errors() -> None:
    """Run each trigger on its own, and print the type and the note of what it raised as JSON."""
    import torch
    import torch.distributed as dist

    def gloo() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    names = {"torch": torch, "load": _load_what_was_saved_from_a_gpu, "gloo": gloo, "store": dist.HashStore()}
    notes: dict[str, list[str | None]] = {}
    if torch.version.cuda is not None:
        notes["has cuda"] = []
    for name, code in {**TRIGGERS, **UNRELATED}.items():
        try:
            exec(code, dict(names))
        except Exception as error:
            notes[name] = [type(error).__name__, str(error), rehearse.explain(error)]
        if dist.is_initialized():
            dist.destroy_process_group()
    print(json.dumps(notes), flush=True)


# ---- the tests


def _start(role: str, **environment: str) -> subprocess.Popen[str]:
    scrubbed = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TORCH", "PYTEST"))}
    return subprocess.Popen(
        [sys.executable, __file__, role],
        env={**scrubbed, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def failures() -> Iterator[list[dict[str, str]]]:
    """For each rank, the checks that failed, with their tracebacks."""
    ranks: list[subprocess.Popen[str]] = []
    watch = _Deadline(ranks)
    try:
        port = ""
        for rank in range(NUM_RANKS):
            process = _start(
                "checks",
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(NUM_RANKS),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                TORCHELASTIC_USE_AGENT_STORE="True",
            )
            ranks.append(process)
            assert process.stdout is not None
            port = port or process.stdout.readline().strip()
        yield [json.loads(process.stdout.readline() or "null") for process in ranks if process.stdout is not None]
    finally:
        watch.cancel()
        for process in ranks:
            _end(process)


class _Deadline:
    """Kills the ranks when they take too long, which ends every read of their output."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        import threading

        def kill() -> None:
            for process in processes:
                process.kill()

        self._timer = threading.Timer(DEADLINE_S, kill)
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
        self._timer.join()


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str, failures: list[dict[str, str]]) -> None:
    for rank, failed in enumerate(failures):
        assert failed is not None, f"rank {rank} ended without a report"
        assert name not in failed, f"rank {rank}:\n{failed[name]}"


@pytest.fixture(scope="module")
def notes() -> Iterator[dict[str, tuple[str, str, str | None]]]:
    """For each trigger, the type and text of its error, and the note."""
    process = _start("errors")
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
        yield json.loads(output.splitlines()[-1])
    finally:
        _end(process)


@pytest.mark.parametrize("name", TRIGGERS)
def test_code_that_cannot_rehearse_has_a_note(name: str, notes: dict[str, tuple[str, str, str | None]]) -> None:
    if name not in notes:
        assert "has cuda" in notes, f"nothing was raised by {name}"
        pytest.skip("a torch that has CUDA does this on a machine without a GPU too")
    type_name, text, note = notes[name]
    if type_name == "ModuleNotFoundError":
        pytest.skip(text)
    assert note is not None, f"{type_name}: {text}"
    assert "taas.device()" in note
    assert 'accelerator="auto"' in note


@pytest.mark.parametrize("name", UNRELATED)
def test_other_errors_have_none(name: str, notes: dict[str, tuple[str, str, str | None]]) -> None:
    type_name, text, note = notes[name]
    assert note is None, f"{type_name}: {text}"


@pytest.mark.parametrize(
    "text",
    [
        # What a torch with CUDA says on a machine without; the one here may have none to say it.
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
        "No CUDA GPUs are available",
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "CUDA error: no CUDA-capable device is detected",
    ],
)
def test_what_a_torch_with_cuda_says(text: str) -> None:
    assert rehearse.explain(RuntimeError(text)) is not None


def _raised(action: Callable[[], None]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        action()
    return caught.value


def test_causes_contexts_and_groups_are_looked_at() -> None:
    wants_cuda = AssertionError("Torch not compiled with CUDA enabled")

    def caused() -> None:
        raise ValueError("no") from wants_cuda

    def in_context() -> None:
        try:
            raise wants_cuda
        except AssertionError:
            raise ValueError("no")  # noqa: B904  # the context is what is tested

    def replaced() -> None:
        try:
            raise wants_cuda
        except AssertionError:
            raise ValueError("no") from None

    assert rehearse.explain(_raised(caused)) is not None
    assert rehearse.explain(_raised(in_context)) is not None
    assert rehearse.explain(ExceptionGroup("all", [ValueError("no"), wants_cuda])) is not None
    assert rehearse.explain(_raised(replaced)) is None


def test_a_circle_of_contexts_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert rehearse.explain(first) is None


def test_notice() -> None:
    assert Place(4, rehearse=True).notice == "no GPU here: rehearsing 4 ranks on CPU; 'nccl' is answered by 'gloo'"
    assert "1 rank on" in Place(1, rehearse=True).notice
    assert Place(4, rehearse=False).notice == ""


if __name__ == "__main__":
    if sys.argv[1] == "checks":
        _run_checks(int(os.environ["RANK"]))
    else:
        _trigger_errors()
