"""How Sphinx turns the pages that build.py has laid out into a site that needs no network."""

import os
import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

logger = logging.getLogger(__name__)

project = "ddp_kit"
author = "the authors of ddp_kit"
language = "en"
smartquotes = False  # "auto" is to be copied
extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "index"

nb_execution_mode = "off"  # the notebooks hold their outputs
nb_merge_streams = True
nb_render_error_lexer = "myst-ansi"  # an error of ranks is no traceback of Python
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # as on GitHub
myst_links_external_new_tab = True
highlight_language = "none"  # an output is no code
# Types in signatures are names of other packages, or internal ones.
nitpick_ignore_regex = [("py:class", ".*")]
copybutton_exclude = ".linenos, .gp"

html_title = "ddp_kit"
html_theme = "sphinx_book_theme"
html_search_scorer = os.path.join(os.path.dirname(__file__), "scorer.js")
html_static_path = ["style"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_copyright = False
html_context = {"default_mode": "auto"}  # light or dark, as the system is
html_math_renderer = "mathml"
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search
    "navigation_with_keys": False,
    "search_bar_text": "Search the course",
    "show_toc_level": 2,
    "use_download_button": False,  # each notebook's page links to its file
    "use_fullscreen_button": False,
}
# The address of the repository is known where the site is published: see .github/workflows.
if repository := os.environ.get("DDP_KIT_REPOSITORY"):
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": os.environ.get("DDP_KIT_BRANCH", "main"),
        "use_repository_button": True,
        "launch_buttons": {
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
            "notebook_interface": "jupyterlab",
        },
    }

# Commands of TeX that latex2mathml does not know, and what looks the same.
SAME = {r"\operatorname": r"\mathrm", r"\arg": r"\mathrm{arg}", r"\_": "_"}


def mathml(translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    source = node.astext()
    for command, known in SAME.items():
        source = source.replace(command, known)
    formula = convert(source, display="block" if isinstance(node, nodes.math_block) else "inline")
    if "\\" in formula:
        logger.warning("a formula has a command that is not known: %s", source, location=node)
    translator.body.append(formula)
    raise nodes.SkipNode


def describe_pictures(app, doctree: nodes.document) -> None:
    """Give each picture of an output the table in words that comes with it, as its alternative."""
    for output in doctree.findall(nodes.container):
        if output.get("nb_element") != "mime_bundle":
            continue
        kinds = {kind["mime_type"]: kind for kind in output if isinstance(kind, nodes.container)}
        for picture in output.findall(nodes.image):
            picture["alt"] = kinds["text/plain"].astext()


def name_languages(app, doctree: nodes.document) -> None:
    """Mark cells that write a shell script as such: all other code is IPython's."""
    for cell in doctree.findall(nodes.literal_block):
        if cell.get("language") == "python":
            cell["language"] = "ipython3"  # an example may have %%ranks
        if re.match(r"%%writefile \S+\.sh\n", cell.astext()):
            cell["language"] = "bash"


def setup(app) -> None:
    """Register the writer of formulas, and what the pages lack."""
    app.connect("doctree-read", describe_pictures)
    app.connect("doctree-read", name_languages)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
