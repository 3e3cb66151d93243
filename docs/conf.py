"""How the site is made: `python -m sphinx -W -n -b dirhtml docs build/site`."""

import inspect
from typing import Any

from docutils import nodes
from latex2mathml import converter
from sphinx.application import Sphinx

import tfdp

project = "tfdp"
author = "The tfdp authors"
copyright = "2026, The tfdp authors"  # noqa: A001 - Sphinx's name
version = release = tfdp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# The notebooks hold their outputs; the tests run them.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Names of other projects are words here: the site is built without a network.
nitpick_ignore_regex = [(r"py:.*", r"(?!tfdp).*")]

html_theme = "furo"
html_title = "tfdp"
html_static_path = ["_static"]
html_css_files = ["tfdp.css"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "native"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def write_formula(translator: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def refuse_missing_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Make a public thing without a docstring of its own a warning, so an error."""
    if what in {"module", "class", "function", "method"} and not any(lines):
        if not inspect.isroutine(obj) or not name.endswith("__"):
            raise ValueError(f"`{name}` is on an API page and has no docstring.")


def setup(app: Sphinx) -> None:
    """Register what is made here."""
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("autodoc-process-docstring", refuse_missing_docstring)
