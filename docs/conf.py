"""How the site is made: `python -m sphinx -W -n -b dirhtml docs build/site`."""

import inspect
import re
import sys
from typing import Any

from docutils import nodes
from latex2mathml import converter
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

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
# In docstrings, `this` is code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
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


TYPES = {"class", "exception"}


def write_formula(translator: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def prepare_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Make a docstring's references a list of its own, and refuse to have none.

    Footnotes are numbered over a whole page, and each docstring begins with 1.

    Raises:
        ExtensionError: If something public has no docstring.
    """
    if what in {*TYPES, "function", "method", "property"} and not lines:
        raise ExtensionError(f"`{name}` is on an API page and has no docstring.")
    lines[:] = [
        re.sub(r"\[(\d)\]_", r"[\1]", re.sub(r"^\.\. \[(\d)\] ", r"\1. ", line))
        for line in lines
    ]


def write_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Show what `__init__` takes, where Keras's `__new__` takes anything.

    Returns:
        The signature, and what is returned.
    """
    if what == "class" and signature == "(*args, **kwargs)":
        _, *parameters = inspect.signature(obj.__init__).parameters.values()
        signature = str(inspect.Signature(parameters))
    # What has private arguments tfdp makes, and users get.
    if what == "class" and re.search(r"[(,] ?_", signature or ""):
        signature = ""
    return signature, returned


def value_of(name: str) -> object:
    """Return what has a full name, or None."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def find_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Point a type in a signature to the name under which a page has it.

    Returns:
        The link; the type's name for a type that no page has; nothing, which is an
        error, for a name that there is not.
    """
    sought = value_of(node["reftarget"])
    if sought is None:
        return None
    domain = env.domains["py"]
    for name, entry in domain.objects.items():
        if entry.objtype in TYPES and value_of(name) is sought:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", name, node, content
            )
    return content


def setup(app: Sphinx) -> None:
    """Register what is made here."""
    formulas = (write_formula, None)
    app.add_html_math_renderer("mathml", formulas, formulas)
    app.connect("autodoc-process-docstring", prepare_docstring)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("missing-reference", find_public_name)
