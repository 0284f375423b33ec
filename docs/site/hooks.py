"""Hooks of mkdocs, since pages are written for a repository host: links to files of the repository, and lists.

README.md is the home page. Every other file outside docs/ that a page links to becomes a page or file below
`repository/`: Markdown as it is, a folder as a list of its files, a program as a listing. Listings are not searched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")
ITEM = re.compile(r"(?:-|\d\.) +")
HOME = {"README.md": "index.md", "docs": "index.md"}
LISTED = {".py", ".yaml", ".toml", ""}
"""Endings of files that are shown as a listing; others, such as results, are copied."""

PATHS: dict[str, str] = {}
"""The file of the repository that a page of the site shows, by the page's URI."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page and the files that pages link to, directly or through another added page."""
    found = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    for path in found:
        uri = site_uri(path)
        PATHS.setdefault(uri, path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=content(path)))
        found += [target for target in targets(path) if target not in found]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to their pages on the site, and indent lists as mkdocs needs it."""
    uri = page.file.src_uri
    path = PATHS[uri]

    def link(found: re.Match[str]) -> str:
        target = resolved(path, found[1])
        return f"]({os.path.relpath(site_uri(target), PurePosixPath(uri).parent)}{found[2]})" if target else found[0]

    return indented(LINK.sub(link, markdown)) if is_page(path) else markdown


def indented(markdown: str) -> str:
    """Widen items of lists to four columns and begin lists after a blank line; repository hosts need neither."""
    lines: list[str] = []
    width = 0  # columns of the current item's marker; 0 outside of lists
    has_blank = is_code = False
    for line in markdown.splitlines():
        marker = ITEM.match(line)
        if line.startswith("```"):
            is_code, width = not is_code, 0
        elif is_code or not line:
            has_blank = True  # an item with a blank line ends only at the next one
        elif marker:
            if (has_blank or not width) and lines and lines[-1]:
                lines.append("")
            width, has_blank = len(marker[0]), False
        elif width and line.startswith(" " * width):
            line = " " * (4 - width) + line
        elif lines and not lines[-1]:
            width = 0
        lines.append(line)
    return "\n".join(lines) + "\n"


def targets(path: str) -> Iterator[str]:
    """Yield what the page of a file or folder links to, as paths in the repository."""
    for link, _ in LINK.findall(str(content(path))) if is_page(path) else ():
        if target := resolved(path, link):
            yield target


def is_page(path: str) -> bool:
    """Return whether the site shows a file or folder as a page with links."""
    return path.endswith(".md") or (ROOT / path).is_dir()


def resolved(path: str, link: str) -> str | None:
    """Return the file or folder that a page or folder links to; None if there is none, which mkdocs reports."""
    folder = PurePosixPath(path) if (ROOT / path).is_dir() else PurePosixPath(path).parent
    target = os.path.normpath(folder / link)
    return target if (ROOT / target).exists() and not target.startswith("..") else None


def site_uri(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path in HOME:
        return HOME[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"repository/{path}/index.md"
    visible = f"repository/{path}".replace("/.", "/")  # mkdocs leaves out names that begin with a dot
    return f"{visible}.md" if is_listed(path) else visible


def is_listed(path: str) -> bool:
    """Return whether a file is shown as a listing."""
    name = PurePosixPath(path).name
    return PurePosixPath(name.removeprefix(".")).suffix in LISTED


def content(path: str) -> str | bytes:
    """Return what the site has in place of a file or folder of the repository."""
    file = ROOT / path
    if file.is_dir():
        lines = [f"- [`{each.name}`]({each.name})" for each in sorted(file.iterdir()) if each.is_file()]
        return "\n".join([f"# `{path}/`", "", *lines, ""])
    if not is_listed(path):
        return file.read_text() if file.suffix == ".md" else file.read_bytes()
    language = "python" if path.startswith("examples/") else ""  # highlighting all of them takes seconds
    return f"---\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n~~~~~~{language}\n{file.read_text()}~~~~~~\n"
