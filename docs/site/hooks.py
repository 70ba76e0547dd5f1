"""What MkDocs cannot do by itself: pages outside of its folder, the list of the ops' pages,
diagrams, two languages."""

from pathlib import Path

import mermaidx
from mkdocs.structure.files import File
from mkdocs.structure.nav import Navigation

ROOT = Path(__file__).parents[2]
PAGES = ["*.md", "docs/*.md", "docs/zh/*.md", "benchmarks/*.md", "examples/**/*.md"]
LINKED = ["LICENSE", "NOTICE", "CITATION.cff"]
LINKED += ["benchmarks/plots/*.png", "docs/figures/*.png", "examples/*.py"]
# the landing page of each language
HOME = {"en": "index.md", "zh": "index.zh-CN.md"}


def on_config(config):
    diagram = {"name": "mermaid", "class": "mermaid", "format": draw}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [diagram]}
    (ops,) = (section["Ops"] for section in config.nav if "Ops" in section)
    ops[:0] = [{page.stem: f"docs/{page.name}"} for page in sorted(ROOT.glob("docs/npu_*_pto.md"))]
    return config


def on_files(files, config):
    """Pages keep their paths in the repository, so their links to each other hold."""
    for pattern in PAGES + LINKED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            file = File.generated(config, name, abs_src_path=str(path))
            if name == "README.md":  # MkDocs would write it to index.html, the landing page
                file.dest_uri = "README.html"
            files.append(file)
    return files


def on_page_content(html, page, config, files):
    """A box takes its title from its kind, which GitHub has in English only."""
    return html.replace(">Important</p>", ">重要</p>") if is_chinese(page.file.src_uri) else html


def on_page_context(context, page, config, nav):
    """The page's language, its translation, and the part of the navigation in its language."""
    chinese = is_chinese(page.file.src_uri)
    sources = {other.file.src_uri: other for other in nav.pages}
    other = sources.get(translation(page.file.src_uri))
    for language in config.extra["alternate"]:
        same = (language["lang"] == "zh") == chinese
        home = sources[HOME[language["lang"]]]
        language["link"] = (page if same else other or home).url
    config.theme["language"] = "zh" if chinese else "en"
    *english, section = nav.items
    items = section.children if chinese else english
    own = [other for other in nav.pages if is_chinese(other.file.src_uri) == chinese]
    context["nav"] = Navigation(items, own)
    context["nav"].homepage = own[0]
    return context


def is_chinese(name: str) -> bool:
    return name.startswith("docs/zh/") or name.endswith(".zh-CN.md")


def translation(name: str) -> str:
    """The same page in the other language, whether there is one or not."""
    folder, suffix = ("docs/zh/", "docs/"), (".zh-CN.md", ".md")
    if is_chinese(name):
        return name.replace(*folder).replace(*suffix)
    return name.replace(*folder[::-1]) if name.startswith("docs/") else name.replace(*suffix[::-1])


def draw(source, language, css_class, options, md, **kwargs) -> str:
    """Drawn here, so that readers load no script from elsewhere."""
    # text of the picture, not HTML, which is cut off where the reader's font is wider
    drawn = mermaidx.render(source, config={"htmlLabels": False})
    return f'<div class="diagram">{drawn.svg()}</div>'
