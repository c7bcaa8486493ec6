"""Run a notebook, keep its outputs in the file, and make a picture of one of its cells as a front end shows it.

Usage: ``python scripts/make_picture.py [NOTEBOOK] [--cells ID,ID] [--output PICTURE.png]``

The defaults make the picture of the README. Needs Chromium (Debian: ``apt install chromium``), which renders the page.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from PIL import Image, ImageChops

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH_PX, TALLEST_PX, MARGIN_PX = 900, 4000, 12
#: Device pixels for one of the page: sharp on screens of high density.
SCALE = 2
STYLE = """
<style>
  body { background: white !important; padding: 0 !important; }
  .jp-Notebook { padding: 0 !important; }
  .jp-Cell { padding: 4px 0 !important; }
  .jp-OutputArea-output pre { line-height: 1.35; }
</style>
"""


def execute(path: Path) -> NotebookNode:
    """Run a notebook in this Python's environment and keep its outputs in the file.

    What its cells write goes elsewhere: they run in a directory of their own.
    """
    notebook: NotebookNode = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="nb-") as directory:
        client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": directory}})
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day, another in each run
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
    return notebook


def page_of(notebook: NotebookNode, cell_ids: list[str]) -> str:
    """An HTML page with some of the cells."""
    chosen = [cell for cell in notebook.cells if cell.get("id") in cell_ids]
    if len(chosen) != len(cell_ids):
        raise SystemExit(f"cells {cell_ids}; the notebook has {[cell.get('id') for cell in notebook.cells]}")
    part = nbformat.v4.new_notebook(cells=chosen, metadata=notebook.metadata)
    exporter = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="")  # type: ignore[no-untyped-call]
    body, _ = exporter.from_notebook_node(part)
    return str(body).replace("</head>", f"{STYLE}</head>")


def photograph(page: str, picture: Path) -> None:
    """Have a browser render the page, and cut off the blank around it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory(prefix="picture-") as directory:
        source, shot = Path(directory, "page.html"), Path(directory, "shot.png")
        source.write_text(page, encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--force-device-scale-factor={SCALE}",
            f"--window-size={WIDTH_PX},{TALLEST_PX}",
            f"--user-data-dir={directory}/profile",
            f"--screenshot={shot}",
        ]
        subprocess.run([browser, *options, source.as_uri()], check=True, capture_output=True, timeout=120)
        image = Image.open(shot).convert("RGB")
        blank = Image.new("RGB", image.size, "white")
        box = ImageChops.difference(image, blank).getbbox()
        if box is None:
            raise SystemExit("the page is blank")
        bottom = min(image.height, box[3] + MARGIN_PX * SCALE)
        picture.parent.mkdir(parents=True, exist_ok=True)
        image.crop((0, 0, image.width, bottom)).quantize(64).save(picture, optimize=True)


def main(arguments: list[str] | None = None) -> int:
    """Make the picture that the arguments describe."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description="Run a notebook and make a picture of one of its cells.")
    parser.add_argument("notebook", type=Path, nargs="?", default=root / "notebooks/quickstart.ipynb")
    parser.add_argument("--cells", default="train,accuracy", metavar="ID,ID")
    parser.add_argument("--output", type=Path, default=root / "docs/images/cell.png", metavar="PICTURE")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    photograph(page_of(execute(options.notebook), options.cells.split(",")), options.output)
    print(f"{options.notebook} has its outputs, {options.output} its picture")
    return 0


if __name__ == "__main__":
    sys.exit(main())
