"""How Sphinx builds the documentation."""

from __future__ import annotations

import logging
from importlib.metadata import version as installed_version

project = "taas-magic"
author = "The taas-magic authors"
copyright = author
release = version = installed_version("taas-magic")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# A pattern in a table of contents names a kind of page; that there is none of a kind is no mistake. Sphinx 9.0 gives
# this warning a subtype but no type, so suppress_warnings cannot name it.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
    lambda record: getattr(record, "subtype", None) != "empty_glob"
)

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "taas-magic"
