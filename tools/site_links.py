"""A hook of mkdocs (mkdocs.yml): links from a page to a file outside docs/, such as code, become
links to the repository if `repo_url` is set, and plain text otherwise. `tools.prose` checks that
these files exist."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page's text with such links replaced."""
    del files
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url}/blob/main/{path})" if config.repo_url else link[1]

    return _LINK.sub(replaced, markdown)
