"""How the documentation is built: python -m sphinx -W --keep-going docs site

Needs the extra `docs`. Warnings, among them links that lead nowhere within the site, are
errors by -W. Pages are Markdown that reads well without being built; what is generated
(the keys of a config, the list of commands) is put in by extensions/generated.py.
"""

import pathlib
import sys

_HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(_HERE / "extensions"), str(_HERE.parent)]

from vit_jax import __version__

project = "vit_jax"
release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "generated",
]

html_theme = "furo"
html_title = "vit_jax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
smartquotes = False  # Quotes are often code: "" is an empty string.

nb_execution_mode = "off"  # Notebooks are shown with the outputs that they keep.
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

# Types of other libraries lead to their documentation. Their inventories are downloaded,
# so that only `sphinx -t online` asks for them.
if tags.has("online"):  # noqa: F821
    extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "jax": ("https://docs.jax.dev/en/latest", None),
    "flax": ("https://flax-linen.readthedocs.io/en/latest", None),
    "optax": ("https://optax.readthedocs.io/en/latest", None),
    "orbax": ("https://orbax.readthedocs.io/en/latest", None),
}
