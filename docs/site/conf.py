"""Sphinx's settings for the site. `docs/make_site.py` arranges the pages first, beside a copy of this file."""

from __future__ import annotations

project = "rpcbench"
author = "the authors of rpcbench"
extensions = ["myst_nb", "sphinx_copybutton", "sphinxcontrib.mermaid"]

root_doc = "index"
html_theme = "furo"
html_title = "rpcbench"
html_extra_path = ["extra"]  # pictures that raw HTML refers to
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "off"  # lessons show their stored outputs
nb_merge_streams = True
nb_render_error_lexer = "text"  # a check's message is no traceback
suppress_warnings = [
    "myst.header",  # a page of the reference begins a member's section two levels down
    "mystnb.unknown_mime_type",  # a widget's view, beside its picture
]
