"""Sphinx's settings for the site. `docs/make_site.py` arranges the pages first, beside a copy of this file.

A page needs nothing from another host: formulas are MathML, which browsers draw by themselves, and diagrams are stored
pictures. Each page has a description for search engines: its first paragraph. Text in columns is marked, as it must not
be wrapped.
"""

from __future__ import annotations

import re
import textwrap
from html import escape
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

project = "rpcbench"
author = "the authors of rpcbench"
extensions = ["myst_nb", "sphinx_copybutton"]

root_doc = "index"
html_theme = "furo"
html_theme_options: dict[str, Any] = {"top_of_page_buttons": ["view"]}  # if `make_site.py` gives the address
html_extra_path = ["extra"]  # files that raw HTML refers to: pictures, notebooks, records
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_show_sourcelink = False
html_show_copyright = False
html_use_index = False  # no page has entries for it
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
myst_update_mathjax = False
nb_execution_mode = "off"  # lessons show their stored outputs
nb_merge_streams = True
nb_render_error_lexer = "text"  # a check's message is no traceback
suppress_warnings = [
    "myst.header",  # a page of the reference begins a member's section two levels down
    "mystnb.unknown_mime_type",  # a widget's view, beside its picture
]

LONGEST = 200  # characters of a description
OTHER_PAGES = "A Jupyter workbench for distributed PyTorch: documents, reference and a course of lessons."

COLUMNS = re.compile(r"\S {2,}[^\s#]|[─-╿]")  # aligned by spaces, which stand before comments too, or drawn
MARK = re.compile(r'<span class="hll">(?=.*# (wrong|right)\b)')
CODE = {"python", "ipython3", "sh", "bash", "toml"}


def show_formula(page: Any, node: nodes.Node) -> None:
    """Write a formula as MathML."""
    if isinstance(node, nodes.math_block):
        page.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    else:
        page.body.append(convert(node.astext()))
    raise nodes.SkipNode


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Give a page its description, and the link to its source."""
    first = None if doctree is None else doctree.next_node(nodes.paragraph)
    text = OTHER_PAGES if first is None else textwrap.shorten(first.astext(), LONGEST, placeholder=" …")
    context["metatags"] = f'{context.get("metatags", "")}<meta name="description" content="{escape(text)}">'
    if pagename == root_doc and context.get("theme_source_view_link"):
        context["theme_source_view_link"] = context["theme_source_view_link"].format(filename="README.md")


def mark_lines(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Tell the wrong lines of a program from the right ones, among those that are emphasized."""
    if "body" in context:
        context["body"] = MARK.sub(r'<span class="hll is-\1">', context["body"])


def mark_columns(app: Sphinx, doctree: nodes.document) -> None:
    """Give blocks of text whose lines stand in columns a class."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") not in CODE and COLUMNS.search(block.astext()):
            block["classes"].append("columns")


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (show_formula, None), (show_formula, None))
    app.connect("doctree-read", mark_columns)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", mark_lines)
