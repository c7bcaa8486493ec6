"""Rehearsal: on a machine without any CUDA device, code written for NCCL and GPUs runs on CPU ranks with gloo.

What names a backend or a device in ``torch.distributed`` is answered for the CPU. The rest of torch stays as it is:
what cannot rehearse, such as ``torch.cuda.set_device(0)``, fails with its own error, and :func:`explain` has a note
for that. Collectives need no help: gloo of torch 2.13 does all that NCCL does for training (averages,
``reduce_scatter``, ``all_gather`` into tensors, ``all_to_all``, a barrier with ``device_ids``), and a test holds that.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator

# torch is patched here: its functions take and return anything, and it types few of the places that are written to.
from typing import Any

_MARK = "_taas_rehearses"

#: What torch, Lightning and Accelerate say where code wants CUDA and there is none. The last ones are said only by a
#: torch that has CUDA, on a machine that has not.
_WANTS_CUDA_TEXTS = (
    r"not compiled with CUDA enabled",
    r"compiled without CUDA support",
    r"requires CUDA support",
    r"module 'torch\._C' has no attribute '_(?:cuda|nccl)_?\w+'",
    r"(?:module|cannot import name) .*ProcessGroupNCCL",
    r"have NCCL built in",
    r"Tried to instantiate dummy base class (?:Event|Stream|CUDAGraph)",
    r"Cannot get CUDA generator",
    r"Cannot access accelerator device when none is available",
    r"NVTX functions not installed",
    r"Attempting to deserialize object on a CUDA device",
    r"SyncBatchNorm expected input tensor to be on",
    r"FSDP needs a non-CPU accelerator device",
    r"No device associated with the default pg",
    r"`CUDAAccelerator` can not run on your system",
    r"No supported gpu backend found",
    r"Found no NVIDIA driver",
    r"No CUDA GPUs are available",
    r"no CUDA-capable device is detected",
    r"no GPUs found",
    r"Unexpected error from cudaGetDeviceCount",
    r"CUDA driver version is insufficient",
    r"invalid argument to (?:reset_)?\w*memory_stats",
)
_WANTS_CUDA = re.compile("|".join(_WANTS_CUDA_TEXTS))

_NOTE = """\
taas: this run rehearses on CPU, and the code above asks for a GPU by name.
to do: take the device from taas.device(), which is the rank's GPU where there is one: model.to(taas.device()),
  torch.load(path, map_location=taas.device()), and torch.cuda calls only behind `if torch.cuda.is_available():`;
  with Lightning, Trainer(accelerator="auto")."""


def install() -> None:
    """Answer for the CPU, from here on and in this process, what names NCCL or a CUDA device.

    To be called in a rank before any code of the user runs. Calling it again changes nothing.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    # Also answers get_default_backend_for_device, and groups made without a backend by a torch that has CUDA.
    distributed_c10d.Backend.default_device_backend_map["cuda"] = "gloo"
    _replace_everywhere(distributed_c10d, "init_process_group", _for_default_group)
    _replace_everywhere(distributed_c10d, "new_group", _for_group)
    _replace(DeviceMesh, "__init__", _for_mesh)
    _replace(DistributedDataParallel, "__init__", _for_replica)
    # Only the public name: inside distributed_c10d, True means that the class ProcessGroupNCCL exists.
    dist.is_nccl_available = _is_nccl_available
    # Accelerate makes no process group on a machine without GPUs unless it is told, and each rank would train alone.
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def explain(error: BaseException) -> str | None:
    """A note for an error that comes from code that wants CUDA in a rehearsal; None for any other error.

    Causes, contexts and the members of groups are looked at, too.
    """
    return _NOTE if any(_WANTS_CUDA.search(str(each)) for each in _chain(error, set())) else None


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    yield from _chain(error.__cause__, seen)
    if not error.__suppress_context__:
        yield from _chain(error.__context__, seen)
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _chain(member, seen)


# ---- what is changed in the arguments of each call


def _for_default_group(arguments: dict[str, Any]) -> None:
    if arguments.get("backend") is None:
        arguments["backend"] = "gloo"  # a torch that has CUDA would take NCCL, GPU or not
    _for_group(arguments)


def _for_group(arguments: dict[str, Any]) -> None:
    if isinstance(arguments.get("backend"), str):
        arguments["backend"] = _cpu_backend(arguments["backend"])
    device = arguments.get("device_id")
    if isinstance(device, int) or getattr(device, "type", None) == "cuda":
        del arguments["device_id"]
    if "NCCL" in type(arguments.get("pg_options")).__qualname__:
        del arguments["pg_options"]


def _for_mesh(arguments: dict[str, Any]) -> None:
    if arguments.get("device_type") == "cuda":
        arguments["device_type"] = "cpu"


def _for_replica(arguments: dict[str, Any]) -> None:
    """Drop the device of a model that is on the CPU because ``taas.device()`` is; a list of several stays an error."""
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in arguments["module"].parameters())
    if is_on_cpu and len(arguments.get("device_ids") or ()) <= 1:
        arguments.pop("device_ids", None)
        arguments.pop("output_device", None)


def _cpu_backend(backend: str) -> str:
    """``backend`` without NCCL and the device that is not here: ``"cpu:gloo,cuda:nccl"`` is ``"gloo"``."""
    name = backend.lower()
    if name == "nccl":
        return "gloo"
    pairs = name.split(",")
    cpu_pairs = [pair for pair in pairs if not re.fullmatch(r"cuda:\w+", pair)]
    if cpu_pairs == pairs:
        return backend
    # Not "cpu:gloo": get_backend() hands the text back, and monitored_barrier looks for "gloo".
    return "gloo" if set(cpu_pairs) <= {"cpu:gloo"} else ",".join(cpu_pairs)


def _is_nccl_available() -> bool:
    """True: who asks for NCCL is answered, by gloo."""
    return True


# ---- replacing


def _replace(owner: Any, name: str, adapt: Callable[[dict[str, Any]], None]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        setattr(owner, name, _adapted(original, adapt))


def _replace_everywhere(module: Any, name: str, adapt: Callable[[dict[str, Any]], None]) -> None:
    """Replace a function, also where other modules have imported it under its own name."""
    original = getattr(module, name)
    if hasattr(original, _MARK):
        return  # whoever imported it since has the replacement; looking through all modules takes milliseconds
    _replace(module, name, adapt)
    replacement = getattr(module, name)
    for each in list(sys.modules.values()):
        # The dict, not getattr: modules that load lazily must not wake up.
        namespace = getattr(each, "__dict__", {})
        if namespace.get(name) is original:
            namespace[name] = replacement


def _adapted(original: Callable[..., Any], adapt: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rehearsed(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which says what is wrong in its own words
        adapt(bound.arguments)
        return original(*bound.args, **bound.kwargs)

    setattr(rehearsed, _MARK, True)
    return rehearsed
