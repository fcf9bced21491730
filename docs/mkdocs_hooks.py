"""mkdocs hooks: pages keep their paths in the repository, so links work in both places and no file is copied."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "recipe/*/README.md")
PICTURES = ("docs/*.png", "docs/*.svg")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)#]+)\)")
SPHINX_ROLE = re.compile(r":(?:mod|class|func|meth|data|attr):<code>(?:~[\w.]*?)?(\w[\w.]*)</code>")


def found(*patterns: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the README of every recipe where the navigation says ``recipe``."""
    for item in config.nav or []:
        if isinstance(item, dict) and "recipe" in item.values():
            readmes = [{PurePosixPath(path).parent.name: path} for path in found("recipe/*/README.md")]
            item.update({title: readmes for title, pages in item.items() if pages == "recipe"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages and pictures under their paths in the repository, in place of the content of ``docs/``."""
    theme = [file for file in files if file.abs_src_path is None or not file.abs_src_path.startswith(config.docs_dir)]
    ours = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in found(*PAGES, *PICTURES)]
    return Files([*theme, *ours])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to code become plain text, for code is not on the site; links to nothing stay, and fail a strict build."""
    folder = (ROOT / page.file.src_uri).parent

    def unlinked(link: re.Match) -> str:
        target = (folder / link[2]).resolve()
        on_the_site = target.suffix in (".md", ".png", ".svg")
        return link[0] if on_the_site or not target.exists() else link[1]

    return LINK.sub(unlinked, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """``:class:`~package.Name``` of docstrings becomes ``Name``."""
    return SPHINX_ROLE.sub(r"<code>\1</code>", html)
