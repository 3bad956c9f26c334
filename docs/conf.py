"""The site of the documentation, made by Sphinx of the Markdown files as they are: `make docs`.

The folder of its sources is the repository, so that links lead where they do in a clone. MyST reads
Markdown, Furo is the theme: both are kept up, and load nothing from elsewhere. (MkDocs would do the
same; its first version is kept up no more, and its second has no plugins.)
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

project = "mlx-lm-server"
html_title = project
author = project
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "examples/README.md"]
exclude_patterns = ["build", "dist", ".*"]

extensions = ["myst_parser"]
myst_heading_anchors = 4
highlight_language = "none"

html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_favicon = "../router/page/icon.svg"

PAGES = {
    "Using": "docs/commands docs/api docs/decisions docs/embeddings docs/adapters docs/ollama"
    " docs/batches docs/page docs/configuration"
    " docs/operations"
    " docs/metrics docs/security docs/clients docs/agents docs/editors docs/templates"
    " examples/README",
    "Deploying": "docs/deploy/install docs/deploy/service docs/deploy/compose"
    " docs/deploy/monitoring docs/deploy/kubernetes docs/deploy/ray docs/localai",
    "Models and speed": "docs/models docs/speculation docs/distributed docs/bench docs/benchmarks"
    " docs/comparison docs/metal",
    "Design": "ARCHITECTURE docs/design/processes docs/design/requests docs/design/scheduler"
    " docs/design/memory docs/design/pages docs/design/own-batch docs/design/prefix-cache"
    " docs/design/recurrent-state docs/design/quantization docs/design/sampling"
    " docs/design/grammars docs/design/speculation docs/design/ranks docs/design/cpu"
    " docs/design/models docs/design/images docs/design/embeddings",
    "Project": "CONTRIBUTING CHANGELOG",
}
"""What the side bar lists below each heading. Sphinx warns of a page that is not here."""

FIRST_PAGES = {"docs": "api.md", "design": "processes.md", "examples": "README.md"}
"""Where links to folders lead, which have no page of their own."""

_TO_FOLDER = re.compile(r"\]\(((?:[\w.]+/)*(\w+)/)\)")
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*")


def adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Lead links to folders to a page, and put the lists of pages below the first one, where Sphinx
    looks for them."""
    source[0] = _TO_FOLDER.sub(
        lambda found: f"]({found[1]}{FIRST_PAGES.get(found[2], '')})", source[0]
    )
    if name == root_doc:
        for caption, pages in PAGES.items():
            lines = "\n".join(pages.split())
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def finish(app: Sphinx, error: Exception | None) -> None:
    """Make the first page the index. Raises if a page loads something from elsewhere."""
    if error is not None:
        return
    site = Path(app.outdir)
    shutil.copy(site / f"{root_doc}.html", site / "index.html")
    for page in site.rglob("*.html"):
        if found := _LOADED.search(page.read_text(encoding="utf-8")):
            raise SphinxError(f"{page.relative_to(site)} loads {found[0]}")


def setup(app: Sphinx) -> None:
    app.connect("source-read", adapt)
    app.connect("build-finished", finish)
