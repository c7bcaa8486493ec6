"""A rank is set up as the kernel is: directory, environment, random states, settings of libraries."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from taas_magic.namespace import process_state


def in_child(script: str) -> dict:
    """Run a script in a new process; it leaves what it found in ``found``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = f"import json, pickle, sys\nfound = {{}}\n{script}\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_other_launchers_left_is_scrubbed() -> None:
    left = {
        "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "RANK": "5",
        "WORLD_SIZE": "9", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "y",
        "GROUP_RANK": "1", "ROLE_RANK": "1",
    }  # fmt: skip
    kept = {"PATH": "/bin", "MASTER": "a", "RANKING": "b", "MY_RANK": "c", "CUDA_VISIBLE_DEVICES": "0"}
    assert process_state.scrubbed({**left, **kept}) == kept


def test_random_states_continue_where_they_were() -> None:
    states = process_state.capture_random()
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    process_state.apply_random(states)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_random_states_import_no_library_on_the_other_side() -> None:
    found = in_child(
        "from taas_magic.namespace import process_state\n"
        "states = pickle.loads(bytes.fromhex(" + repr(_pickled(process_state.capture_random()).hex()) + "))\n"
        "process_state.apply_random(states, only_imported=True)\n"
        "import random; found['random'] = random.random()\n"
        "found['imported'] = [name for name in ('numpy', 'torch') if name in sys.modules]\n"
    )
    assert found == {"random": random.random(), "imported": []}


def test_a_kernel_without_numpy_gives_every_run_a_seed_of_its_own() -> None:
    script = (
        "from taas_magic.namespace import process_state\n"
        "found['seeds'] = [process_state.capture_random()['numpy_seed'] for _ in range(2)]\n"
        "found['has_torch'] = 'torch' in process_state.capture_random()\n"
    )
    found = in_child(script)
    assert found["seeds"][0] != found["seeds"][1]
    assert not found["has_torch"]


def test_a_process_is_set_up_like_the_one_that_was_captured(tmp_path) -> None:
    script = f"""
import logging, os, warnings
os.chdir({str(tmp_path)!r})
import numpy as np, torch
from taas_magic.namespace import process_state
sys.path.insert(0, "/nowhere/lib"); sys.argv[:] = ["prog", "--flag"]
warnings.filterwarnings("ignore", message="boring"); np.set_printoptions(precision=3)
logging.basicConfig(level=logging.DEBUG, format="<%(message)s>"); logging.getLogger("chatty").setLevel(logging.ERROR)
torch.set_default_dtype(torch.float64); torch.use_deterministic_algorithms(True); torch.set_grad_enabled(False)
state = pickle.dumps(process_state.capture({{"A": "1"}}))
found["state"] = state.hex()
"""
    state = in_child(script)["state"]
    found = in_child(f"""
import logging, os, warnings
from taas_magic.namespace import process_state
state = pickle.loads(bytes.fromhex({state!r}))
process_state.apply(state)
process_state.set_environment({{**state.environment, "PATH": os.environ["PATH"]}})
import numpy as np, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.warn("boring"); warnings.warn("useful")
found = dict(
    directory=os.getcwd(), path=sys.path[0], argv=sys.argv, warnings=[str(w.message) for w in caught],
    precision=np.get_printoptions()["precision"], level=logging.root.level, chatty=logging.getLogger("chatty").level,
    formats=[h.formatter._fmt for h in logging.root.handlers], dtype=str(torch.get_default_dtype()),
    deterministic=torch.are_deterministic_algorithms_enabled(), grad=torch.is_grad_enabled(),
    environment=sorted(set(os.environ) - {{"PATH", "LC_CTYPE"}}),
)
""")
    assert found == {
        "directory": str(tmp_path), "path": "/nowhere/lib", "argv": ["prog", "--flag"], "warnings": ["useful"],
        "precision": 3, "level": 10, "chatty": 40, "formats": ["<%(message)s>"], "dtype": "torch.float64",
        "deterministic": True, "grad": False, "environment": ["A"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_kernel_that_has_not_imported_a_library_does_not_by_this(name: str) -> None:
    found = in_child(
        "from taas_magic.namespace import process_state\nprocess_state.capture({})\n"
        f"found['imported'] = {name!r} in sys.modules\n"
    )
    assert found == {"imported": False}


def _pickled(value: object) -> bytes:
    import pickle

    return pickle.dumps(value)
