"""Who is measured: how each launches code on N ranks from a notebook cell.

A contestant's cells are what its documentation tells a user to write. Where there is a choice, the faster way is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launching.jobs import KINDS, Job, free_port


def _no_setup(num_ranks: int) -> str:
    return "pass"


@dataclass(frozen=True)
class Contestant:
    """One way to run code on N ranks.

    Attributes:
        key: What ``--only`` takes.
        title: What the table says.
        cell: The cell that is measured, for a job.
        setup: A cell that comes before, not measured, for a number of ranks.
        teardown: A cell that comes after each launch, not measured.
        needs: The distribution that must be installed.
        is_peer: Whether it runs with ``--peers-python``.
        warms_up: Whether one launch that is not measured precedes the measured ones of a notebook.
        kinds: The kinds of job that make sense for it.
    """

    key: str
    title: str
    cell: Callable[[Job], str]
    setup: Callable[[int], str] = _no_setup
    teardown: str | None = None
    needs: str = "torch"
    is_peer: bool = False
    warms_up: bool = True
    kinds: tuple[str, ...] = KINDS


# -- ours --------------------------------------------------------------------------------------------------------------


def _taas_setup(num_ranks: int) -> str:
    return "%load_ext taas_magic"


def _taas(job: Job) -> str:
    return f"#pragma taas --gpus {job.num_ranks}\n{job.body}"


def _taas_kept_setup(num_ranks: int) -> str:
    form = 'import torch.distributed; torch.distributed.init_process_group("gloo")'
    return f"%load_ext taas_magic\n#pragma taas --gpus {num_ranks} --keep\n{form}"


# -- torch -------------------------------------------------------------------------------------------------------------


def _torchrun(job: Job) -> str:
    # What `!torchrun` does, with an error where the command fails and without a pty.
    return f"""\
import subprocess, sys
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
process = subprocess.Popen([*torchrun, "--nproc-per-node={job.num_ranks}", {str(job.script)!r}])
try:
    process.wait()
except KeyboardInterrupt:
    process.wait()
    raise
if process.returncode:
    raise RuntimeError(f"torchrun ended with {{process.returncode}}")
"""


def _elastic(job: Job, start_method: str) -> str:
    module = job.module
    return f"""\
import sys
sys.path.insert(0, {str(module.parent)!r})
from {module.stem} import train
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node={job.num_ranks}, run_id="benchmark", max_restarts=0,
    rdzv_backend="static", rdzv_endpoint="127.0.0.1:{free_port()}", rdzv_configs={{"rank": 0}},
    local_addr="127.0.0.1", start_method={start_method!r},
)
elastic_launch(config, train)()
"""


# -- peers that start ranks for each run -------------------------------------------------------------------------------


def _accelerate(job: Job) -> str:
    return f"""\
{job.function("train")}
from accelerate import notebook_launcher
notebook_launcher(train, num_processes={job.num_ranks}, use_port="{free_port()}")
"""


def _torchrunx(job: Job) -> str:
    return f"""\
{job.function("train")}
import torchrunx
torchrunx.Launcher(hostnames=["localhost"], workers_per_host={job.num_ranks}, backend="gloo").run(train)
"""


# -- peers whose engines live on ---------------------------------------------------------------------------------------


def _ipyparallel_start(num_ranks: int) -> str:
    # The rank's environment is what a user without MPI has to set by hand.
    return f"""\
import logging
import ipyparallel
cluster = ipyparallel.Cluster(n={num_ranks}, log_level=logging.ERROR)
engines = cluster.start_and_connect_sync()
engines[:].activate()
def join(rank):
    import os
    os.environ.update(RANK=str(rank), WORLD_SIZE="{num_ranks}", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
for pending in [engine.apply_async(join, rank) for rank, engine in enumerate(engines)]:
    pending.get()
"""


_IPYPARALLEL_STOP = "cluster.stop_cluster_sync()"


def _ipyparallel_steady_setup(num_ranks: int) -> str:
    form = 'import torch.distributed; torch.distributed.init_process_group("gloo")'
    return f"{_ipyparallel_start(num_ranks)}\nengines[:].execute({form!r}, block=True)"


def _ipyparallel(job: Job) -> str:
    return f"%%px --block\n{job.body}"


def _ipyparallel_from_start(job: Job) -> str:
    return f'{_ipyparallel_start(job.num_ranks)}\nget_ipython().run_cell_magic("px", "--block", {job.body!r})'


def _nbdistributed_start(num_ranks: int) -> str:
    # %dist_init returns after two seconds, ready or not, and a cell that is sent too early times out after thirty.
    return f"""\
import sys
get_ipython().run_line_magic("dist_init", "-n {num_ranks}")
connection = get_ipython().magics_manager.registry["DistributedMagic"]._comm_manager
while True:
    try:
        connection.send_to_all("get_status", {{}}, timeout=0.5)
        break
    except TimeoutError:
        pass
"""


def _nbdistributed_load(num_ranks: int) -> str:
    return "%load_ext nbdistributed"


def _nbdistributed_steady_setup(num_ranks: int) -> str:
    return f"%load_ext nbdistributed\n{_nbdistributed_start(num_ranks)}"


def _nbdistributed(job: Job) -> str:
    return f"%%distributed\n{job.body}"


def _nbdistributed_from_start(job: Job) -> str:
    return f'{_nbdistributed_start(job.num_ranks)}\nget_ipython().run_cell_magic("distributed", "", {job.body!r})'


#: An empty cell, a failure and an interrupt of contestants that start engines are those of the engines that are up.
_STARTS = ("launch",)

CONTESTANTS = (
    Contestant("taas", "**taas** (pragma cell)", _taas, _taas_setup, needs="taas-magic"),
    Contestant(
        "taas-kept",
        "**taas**, ranks kept, with their process group",
        _taas,
        _taas_kept_setup,
        needs="taas-magic",
    ),
    Contestant("accelerate", "Accelerate `notebook_launcher` (fork)", _accelerate, needs="accelerate"),
    Contestant("elastic-fork", 'torch `elastic_launch("fork")`', lambda job: _elastic(job, "fork")),
    Contestant("elastic-spawn", 'torch `elastic_launch("spawn")`', lambda job: _elastic(job, "spawn"), warms_up=False),
    Contestant("torchrun", "`torchrun --standalone`", _torchrun, warms_up=False),
    Contestant("torchrunx", "torchrunx", _torchrunx, needs="torchrunx", is_peer=True, warms_up=False),
    Contestant(
        "ipyparallel-start",
        "ipyparallel, engines started for the run",
        _ipyparallel_from_start,
        teardown=_IPYPARALLEL_STOP,
        needs="ipyparallel",
        is_peer=True,
        warms_up=False,
        kinds=_STARTS,
    ),
    Contestant(
        "ipyparallel-steady",
        "ipyparallel, engines and process group already up",
        _ipyparallel,
        _ipyparallel_steady_setup,
        needs="ipyparallel",
        is_peer=True,
    ),
    Contestant(
        "nbdistributed-start",
        "nbdistributed, workers started for the run",
        _nbdistributed_from_start,
        _nbdistributed_load,
        needs="nbdistributed",
        is_peer=True,
        warms_up=False,
        # One launch, and no teardown: its own may end processes of the whole machine by name (`pkill -f`). What the
        # notebook leaves is ended by process id.
        kinds=_STARTS,
    ),
    Contestant(
        "nbdistributed-steady",
        "nbdistributed, workers and process group already up",
        _nbdistributed,
        _nbdistributed_steady_setup,
        needs="nbdistributed",
        is_peer=True,
    ),
)
