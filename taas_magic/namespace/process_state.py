"""Process-wide state that a cell counts on: directory, environment, random states, numeric and logging settings.

Captured in the kernel, applied in every rank before its names are loaded. Only random states come home. Libraries that
the kernel has not imported are not imported for this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Variables of schedulers and launchers that a rank must not inherit: libraries would believe them (Lightning reads
#: SLURM's).
SCRUBBED_PREFIXES = (
    "SLURM_", "SLURMD_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "MV2_", "I_MPI_", "HYDRA_", "MPI_", "ALPS_", "LSB_", "JSM_",
    "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GROUP_", "ROLE_", "ACCELERATE_", "PET_", "FLUX_",
)  # fmt: skip
SCRUBBED_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
)


@dataclass
class ProcessState:
    """What a rank sets up before the cell's names are loaded."""

    directory: str
    sys_path: list[str]
    environment: dict[str, str]
    random_states: dict[str, Any]
    torch_settings: dict[str, Any] = field(default_factory=dict)
    numpy_print_options: dict[str, Any] | None = None
    warning_filters: list[Any] = field(default_factory=list)
    logger_levels: dict[str, int] = field(default_factory=dict)
    #: (stream name, level, format, date format) of the root logger's plain stream handlers.
    log_handlers: list[tuple[str, int, str | None, str | None]] = field(default_factory=list)
    argv: list[str] = field(default_factory=list)


def scrubbed(environment: dict[str, str]) -> dict[str, str]:
    """The environment without what other launchers left in it."""
    return {
        name: value
        for name, value in environment.items()
        if name not in SCRUBBED_NAMES and not name.startswith(SCRUBBED_PREFIXES)
    }


def capture(environment: dict[str, str]) -> ProcessState:
    """Capture this process's state; ``environment`` is what the ranks get (already scrubbed and completed)."""
    return ProcessState(
        directory=os.getcwd(),
        sys_path=list(sys.path),
        environment=environment,
        random_states=capture_random(),
        torch_settings=_capture_torch(),
        numpy_print_options=_numpy_print_options(),
        warning_filters=[_portable_filter(entry) for entry in warnings.filters if _is_by_name(entry)],
        logger_levels=_logger_levels(),
        log_handlers=_log_handlers(),
        argv=list(sys.argv),
    )


def apply(state: ProcessState, moved: Sequence[tuple[str, str]] = ()) -> None:
    """Set this process up like the one that was captured, except for its environment (see :func:`set_environment`).

    Args:
        state: What was captured.
        moved: Where directories are here that are elsewhere there: (there, here). Then this is another machine.
    """
    apply_place(state, moved)
    sys.argv[:] = [_moved(word, moved) for word in state.argv]
    warnings.filters[:] = state.warning_filters  # type: ignore[index]
    warnings._filters_mutated() if hasattr(warnings, "_filters_mutated") else None
    _apply_logging(state)
    _apply_torch(state.torch_settings)
    if state.numpy_print_options is not None and state.numpy_print_options != _numpy_print_options():
        import numpy as np

        np.set_printoptions(**state.numpy_print_options)
    apply_random(state.random_states)


def apply_place(state: ProcessState, moved: Sequence[tuple[str, str]] = ()) -> None:
    """Go to where the captured process was, and find modules where it did."""
    if not moved:
        os.chdir(state.directory)
        sys.path[:] = state.sys_path
        return
    directory = _moved(state.directory, moved)
    os.chdir(directory if Path(directory).is_dir() else moved[0][1])
    # Another machine's own packages are in directories of its own.
    there = [path for each in state.sys_path if (path := _moved(each, moved)) != each or not each]
    sys.path[:] = list(dict.fromkeys([*there, *sys.path]))


def _moved(path: str, moved: Sequence[tuple[str, str]]) -> str:
    for there, here in moved:
        if path == there or path.startswith(there.rstrip("/") + "/"):
            return here + path[len(there.rstrip("/")) :]
    return path


def set_environment(environment: dict[str, str]) -> None:
    """Replace the whole environment; C code sees it too."""
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


# -- random states ---------------------------------------------------------------------------------------------------


def capture_random() -> dict[str, Any]:
    """The states of ``random``, and of numpy and torch where they are imported; all as plain values and bytes.

    Loading them must not import a library that the other side has not imported.
    """
    states: dict[str, Any] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and hasattr(numpy, "random"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tobytes(), *rest)
    else:
        # Forked ranks would share the state that the zygote happened to have; a fresh seed is what a new process has.
        states["numpy_seed"] = int.from_bytes(os.urandom(4), "little")
    if torch is not None and hasattr(torch, "get_rng_state"):
        states["torch"] = _bytes_of(torch.get_rng_state())
        if torch.cuda.is_initialized():
            states["cuda"] = _bytes_of(torch.cuda.get_rng_state())
    return states


def apply_random(states: dict[str, Any], *, only_imported: bool = False) -> None:
    """Set the random states; ``only_imported`` leaves libraries alone that this process has not imported."""
    random.setstate(states["random"])
    if ("numpy" in states or "numpy_seed" in states) and ("numpy" in sys.modules or not only_imported):
        import numpy as np

        if "numpy" in states:
            name, keys, *rest = states["numpy"]
            np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
        else:
            np.random.seed(states["numpy_seed"])
    if "torch" in states and ("torch" in sys.modules or not only_imported):
        import torch

        torch.set_rng_state(_byte_tensor(states["torch"]))
        if "cuda" in states and torch.cuda.is_available() and (torch.cuda.is_initialized() or not only_imported):
            torch.cuda.set_rng_state(_byte_tensor(states["cuda"]))


def _bytes_of(tensor: Any) -> bytes:
    # Without numpy there is no faster way.
    return bytes(tensor.numpy().tobytes() if "numpy" in sys.modules else tensor.tolist())


def _byte_tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# -- settings of libraries -------------------------------------------------------------------------------------------


def _capture_torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    printing = vars(torch._tensor_str.PRINT_OPTS)
    return {
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "grad_enabled": torch.is_grad_enabled(),
        "print_options": {name: printing[name] for name in ("precision", "threshold", "edgeitems", "linewidth")},
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
    }


def _apply_torch(settings: dict[str, Any]) -> None:
    """Set what differs; setting a value anew can be dear (torch imports its compiler to be told about determinism)."""
    if not settings:
        return
    import torch

    current = _capture_torch()
    changed = {name: value for name, value in settings.items() if current[name] != value}
    for name, value in changed.items():
        if name in _TORCH_SETTERS:
            _TORCH_SETTERS[name](torch, value)
    if "deterministic" in changed or "deterministic_warn_only" in changed:
        warn_only = settings["deterministic_warn_only"]
        torch.use_deterministic_algorithms(settings["deterministic"], warn_only=warn_only)


_TORCH_SETTERS: dict[str, Callable[[Any, Any], Any]] = {
    "default_dtype": lambda torch, value: torch.set_default_dtype(value),
    "matmul_precision": lambda torch, value: torch.set_float32_matmul_precision(value),
    "grad_enabled": lambda torch, value: torch.set_grad_enabled(value),
    "print_options": lambda torch, value: torch.set_printoptions(**value),
    "cudnn_benchmark": lambda torch, value: setattr(torch.backends.cudnn, "benchmark", value),
    "cudnn_deterministic": lambda torch, value: setattr(torch.backends.cudnn, "deterministic", value),
}


def _numpy_print_options() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "get_printoptions"):
        return None
    options: dict[str, Any] = numpy.get_printoptions()
    return {name: value for name, value in options.items() if name not in ("formatter", "override_repr")}


# -- warnings and logging --------------------------------------------------------------------------------------------


def _is_by_name(entry: Any) -> bool:
    """Whether a warning filter can be sent: its category must be importable."""
    category = entry[2]
    module = sys.modules.get(category.__module__)
    return category.__module__ != "__main__" and getattr(module, category.__qualname__, None) is category


def _portable_filter(entry: Any) -> Any:
    """The filter with a category that can be loaded without the library that defines it.

    Libraries add filters for warnings of their own when they are imported; ranks must not import a library for those.
    """
    action, message, category, module, line = entry
    if category.__module__ != "builtins":
        category = CategoryNamed(category.__module__, category.__qualname__)
    return action, message, category, module, line


class CategoryNamed:
    """A warning category known by its name; takes the place of the class in a filter, imported or not.

    ``warnings`` asks a filter's category about the class of a warning with ``issubclass``, which comes here.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self.__name__ = name

    def __subclasscheck__(self, kind: type) -> bool:
        return any(base.__module__ == self._module and base.__qualname__ == self._name for base in kind.__mro__)

    def __repr__(self) -> str:
        return f"<warning category {self._module}.{self._name}>"


def _logger_levels() -> dict[str, int]:
    levels = {"": logging.root.level}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET:
            levels[name] = logger.level
    return levels


def _log_handlers() -> list[tuple[str, int, str | None, str | None]]:
    handlers = []
    for handler in logging.root.handlers:
        if type(handler) is not logging.StreamHandler:
            continue
        for name in ("stdout", "stderr"):
            if handler.stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
                formatter = handler.formatter
                style = (formatter._fmt, formatter.datefmt) if formatter is not None else (None, None)
                handlers.append((name, handler.level, *style))
                break
    return handlers


def _apply_logging(state: ProcessState) -> None:
    for name, level in state.logger_levels.items():
        logger = logging.getLogger(name or None)
        # Each setting empties the caches of all loggers.
        if logger.level != level:
            with contextlib.suppress(ValueError):
                logger.setLevel(level)
    for stream, level, fmt, date_format in state.log_handlers:
        handler = logging.StreamHandler(getattr(sys, stream))
        handler.setLevel(level)
        if fmt is not None:
            handler.setFormatter(logging.Formatter(fmt, date_format))
        logging.root.addHandler(handler)
