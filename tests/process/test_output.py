"""What a pragma cell shows: streams, other ranks, logs, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import Notebook, ranks, warm_notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, private_temp: Path, started_once: None) -> Iterator[Notebook]:
    with warm_notebook(tmp_path_factory.mktemp("project")) as notebook:
        yield notebook


# ---- streams


def test_streams_are_apart_and_in_order(notebook: Notebook) -> None:
    source = "import sys\nfor i in range(3):\n    print('out', i)\n    print('err', i, file=sys.stderr)"
    cell = ranks(notebook, source).ok()
    assert cell.stdout == "out 0\nout 1\nout 2\n"
    assert [line for line in cell.stderr.splitlines() if line.startswith("err")] == ["err 0", "err 1", "err 2"]


def test_what_goes_past_python_is_captured_too(notebook: Notebook) -> None:
    cell = ranks(
        notebook,
        "import ctypes, os, subprocess, sys\nlibc = ctypes.CDLL(None)\n"
        "libc.puts(b'from C'); libc.fflush(None)\nos.write(1, b'from write\\n')\n"
        "subprocess.run(['sh', '-c', 'echo from a child; echo and its errors >&2'], check=True)",
    ).ok()
    assert cell.stdout == "from C\nfrom write\nfrom a child\n"
    assert "and its errors\n" in cell.stderr


def test_c_output_that_nobody_flushed_is_not_lost(notebook: Notebook) -> None:
    assert "unflushed" in ranks(notebook, "import ctypes\nctypes.CDLL(None).puts(b'unflushed')").ok().stdout


def test_carriage_returns_and_incomplete_lines_come_as_they_are(notebook: Notebook) -> None:
    source = (
        "import sys, time\nfrom tqdm import tqdm\nfor _ in tqdm(range(3), mininterval=0): pass\n"
        "print('a\\rb', end=''); print('é€', end='')"
    )
    cell = ranks(notebook, source).ok()
    assert cell.stdout == "a\rbé€"
    bars = [part for part in cell.stderr.split("\r") if "it/s" in part or "/3" in part]
    assert len(bars) >= 2
    assert "3/3" in bars[-1]


def test_output_streams_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    notebook.start(
        "#pragma taas --gpus 2\nimport os, time\nprint('started')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('done')"
    )
    assert "done" not in notebook.wait_for_output("started").stdout
    go.touch()
    assert notebook.wait().ok().stdout == "started\ndone\n"


def test_other_ranks_are_kept_and_shown_on_demand(notebook: Notebook) -> None:
    source = "import taas\nfor i in range(2): print(f'line {i} of {taas.rank()}')"
    assert "of 1" not in ranks(notebook, source).ok().stdout
    log = notebook.run("%taas logs --rank 1").ok()
    assert "line 0 of 1\nline 1 of 1\n" in log.stdout
    assert "of 0" not in log.stdout
    for flags in ("--show all", "--show 0,1"):
        shown = ranks(notebook, source, flags=flags).ok().stdout.splitlines()
        for rank, mark in enumerate(("", "[rank 1] ")):
            lines = [line for line in shown if line.endswith(f"of {rank}")]
            assert lines == [f"{mark}line {i} of {rank}" for i in range(2)]
    only_1 = ranks(notebook, source, flags="--show 1").ok().stdout
    assert "of 1" in only_1
    assert "of 0" not in only_1


def test_lines_of_ranks_that_write_at_the_same_time_stay_whole(notebook: Notebook) -> None:
    cell = ranks(notebook, "import taas\nfor i in range(500): print(taas.rank(), 'says', i)", flags="--show all").ok()
    assert sorted(cell.stdout.splitlines()) == sorted(
        [f"0 says {i}" for i in range(500)] + [f"[rank 1] 1 says {i}" for i in range(500)]
    )


def test_no_line_is_lost_and_no_rank_blocked_by_much_output(notebook: Notebook) -> None:
    num_lines = 100_000
    cell = ranks(notebook, f"import taas\nfor i in range({num_lines}): print(taas.rank(), i)").ok()
    assert cell.stdout == "".join(f"0 {i}\n" for i in range(num_lines))
    notebook.run("import contextlib, io\ncaught = io.StringIO()").ok()
    notebook.run(
        "with contextlib.redirect_stdout(caught):\n    get_ipython().run_line_magic('taas', 'logs --rank 1')"
    ).ok()
    counted = notebook.run(f"caught.getvalue() == ''.join(f'1 {{i}}\\n' for i in range({num_lines}))").ok()
    assert counted.result == "True"


def test_equal_lines_are_not_taken_for_one(notebook: Notebook) -> None:
    assert ranks(notebook, "for _ in range(50): print('same')").ok().stdout == "same\n" * 50


# ---- libraries that write


def test_logging_as_it_was_set_up_in_an_earlier_cell(notebook: Notebook) -> None:
    notebook.run(
        "import logging\nlogging.basicConfig(level=logging.INFO, format='<%(levelname)s> %(message)s', force=True)"
    ).ok()
    source = "import logging\nlogging.info('shown'); logging.debug('hidden'); logging.getLogger('a.b').warning('named')"
    cell = ranks(notebook, source).ok()
    assert cell.stderr.count("<INFO> shown\n") == 1
    assert cell.stderr.count("<WARNING> named\n") == 1
    assert "hidden" not in cell.stderr
    notebook.run("logging.basicConfig(force=True, level=logging.WARNING)").ok()


def test_warnings_show_once_and_follow_the_notebooks_filters(notebook: Notebook) -> None:
    notebook.run("import warnings\nwarnings.filterwarnings('ignore', message='boring')").ok()
    cell = ranks(
        notebook, "import warnings\nfor _ in range(2):\n    warnings.warn('useful')\n    warnings.warn('boring')"
    ).ok()
    assert cell.stderr.count("UserWarning: useful") == 1
    assert "boring" not in cell.stderr


def test_rich_writes_tables(notebook: Notebook) -> None:
    cell = ranks(
        notebook,
        "from rich.console import Console\nfrom rich.table import Table\ntable = Table('name', 'loss')\n"
        "table.add_row('net', '0.1')\nConsole(force_jupyter=False, width=40).print(table)",
    ).ok()
    assert re.search(r"net\s+.\s+0\.1", cell.stdout)


# ---- errors


def test_an_error_shows_the_cells_lines_and_those_of_earlier_cells(notebook: Notebook) -> None:
    notebook.run("def divide(a, b):\n    quotient = a / b  # in an earlier cell\n    return quotient").ok()
    cell = ranks(notebook, "import taas\nnum = 5\ndivide(num, taas.rank() - 1)  # in this cell")
    assert cell.error_name == "ZeroDivisionError"
    assert "quotient = a / b  # in an earlier cell" in cell.traceback_text
    assert "divide(num, taas.rank() - 1)  # in this cell" in cell.traceback_text
    assert "[rank 1]" in cell.traceback_text
    assert "site-packages" not in cell.traceback_text
    assert "taas_magic" not in cell.traceback_text


def test_a_function_that_the_cell_made_has_its_source_in_the_notebook(notebook: Notebook) -> None:
    ranks(notebook, "def reciprocal(x):\n    'made on a rank'\n    return 1 / x").ok()
    assert "----> 4     return 1 / x" in notebook.run("reciprocal(0)").traceback_text
    assert "return 1 / x" in ranks(notebook, "reciprocal(0)").traceback_text
    assert "made on a rank" in notebook.run("import inspect\nprint(inspect.getsource(reciprocal))").ok().stdout


#: All ranks get behind this before one goes on, and an interrupt on account of another's failure stops none.
TOGETHER = """
import os, signal, taas, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
here = Path(meeting) / str(taas.rank())
here.touch()
while len(list(here.parent.iterdir())) < taas.world_size(): time.sleep(0.001)
"""


def test_equal_errors_are_collated(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"meeting = {str(tmp_path)!r}").ok()
    cell = ranks(notebook, TOGETHER + "raise ValueError('all alike')", num_ranks=3)
    assert (cell.error_name, cell.error_value.splitlines()[0]) == ("ValueError", "all alike")
    assert cell.traceback_text.count("the same error") == 1
    assert cell.traceback_text.count("----> ") == 1


def test_different_errors_are_listed(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"meeting = {str(tmp_path)!r}").ok()
    cell = ranks(notebook, TOGETHER + "kinds = KeyError, ValueError\nraise kinds[taas.rank()](f'by {taas.rank()}')")
    other = {"KeyError": "rank 1: ValueError: by 1", "ValueError": "rank 0: KeyError: 'by 0'"}[cell.error_name]
    assert other in cell.traceback_text


def test_an_exception_can_be_caught_in_the_notebook(notebook: Notebook) -> None:
    cell = notebook.run(
        "try:\n    get_ipython().run_cell_magic('taas', '--gpus 2', 'raise KeyError(\"missing\")')\n"
        "except KeyError as error:\n    caught = error.args"
    )
    cell.ok()
    assert notebook.run("caught").ok().result == "('missing',)"


def test_an_exception_of_a_class_of_the_notebook_keeps_its_class(notebook: Notebook) -> None:
    notebook.run("class MyError(Exception): pass").ok()
    cell = ranks(notebook, "raise MyError('mine')")
    assert cell.error_name == "MyError"
    assert cell.error_value.splitlines()[0] == "mine"


def test_the_notebook_goes_on_after_an_error(notebook: Notebook) -> None:
    assert ranks(notebook, "1 / 0").status == "error"
    assert ranks(notebook, "2 + 2").ok().result == "4"
