"""Sphinx configuration: MyST pages, the API from docstrings, nothing fetched from elsewhere."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import version as _installed
from typing import TYPE_CHECKING

from sphinx.util import logging

import opake_lightning

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "opake_lightning"
author = "The opake_lightning authors"
copyright = author
version = release = _installed("opake-lightning")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "opake_lightning"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Guarantees", "notes_style"), ("Source", "notes_style")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# Names of other projects are printed, not linked: a build needs no network. A name of this package
# that leads nowhere stays an error.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|torchopt|lightning|lightning_fabric|pytorch_lightning|numpy|np|optree|torchmetrics"
        r"|dp_accounting|collections|typing|pathlib|datetime|abc|argparse|jsonargparse|os)(\..*)?",
    ),
    (
        r"py:.*",
        r"(Any|Callable|Hashable|Iterable|Iterator|Mapping|Sequence|Self|Literal|Path|PathLike"
        r"|Tensor|Module|Parameter|Generator|DataLoader|Dataset|Sampler|GradientTransformation"
        r"|LightningModule|Trainer|Callback|DDPStrategy|TransformInitFn|TransformUpdateFn|optional|True|False|None)",
    ),
    # A private type or an alias in a signature says what to pass; it has no page of its own.
    (r"py:class", r"(opake_lightning\.trainer\.data\.DrawFn|Run|Sampling|SecondMoment)"),
    (r"py:.*", r"opake_lightning\.(\w+\.)*_\w+(\..*)?"),
]

_LOG = logging.getLogger(__name__)


def _documented(full_name: str) -> object | None:
    module, _, name = full_name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:  # a method or an attribute: its class counts
        return None


def _every_public_name_has_an_entry(_: Sphinx, env: BuildEnvironment) -> None:
    # By identity: a package may offer what one of its modules defines, and one entry is enough.
    entries = {id(_documented(name)) for name in env.domains.python_domain.objects}
    for info in pkgutil.walk_packages(opake_lightning.__path__, "opake_lightning."):
        if any(part.startswith("_") for part in info.name.split(".")):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError as error:
            _LOG.warning("%s cannot be imported: %s", info.name, error)
            continue
        for name in getattr(module, "__all__", ()):
            if id(getattr(module, name)) not in entries:
                _LOG.warning(
                    "%s.%s is public but has no entry in docs/api: give it a docstring, "
                    "or its module a page",
                    info.name,
                    name,
                )


def setup(app: Sphinx) -> None:
    """Fail the build (``-W``) when a public name is missing from it."""
    app.connect("env-check-consistency", _every_public_name_has_an_entry)
