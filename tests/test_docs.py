"""Every link, repository path and test named in the documentation exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md"],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
# Folders that a path in the text may start from.
STARTS = [
    ROOT,
    ROOT / "src/memfit",
    ROOT / "src/memfit/ghost",
    ROOT / "src/memfit/ghost/runtime",
    ROOT / "tests",
]
SUFFIXES = "py|c|h|toml|md|json|png|pyi"
FILES = {
    path.name
    for folder in ("src", "tests", "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*.*")
}
# Files of the reader, of PyTorch and of other projects.
FOREIGN = {
    "SCRIPT.py",
    "ConvUtils.h",
    "blocks.py",
    "train.py",
    "c10/cuda/CUDACachingAllocator.h",
    "cudnn_graph.h",
    "memfit-baseline.json",
    "plan.json",
    "plans.json",
}


def prose(page):
    """Return a page's text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page):
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in target]


def anchors(page):
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_paths(page):
    """Return what the code in a page's text names: paths with a folder, and files by their name alone."""
    words = [word for code in re.findall(r"`([^`]+)`", prose(page)) for word in code.split()]
    return [
        word.split("::")[0].removeprefix("./").rstrip(",;:")
        for word in words
        if re.search(rf"^[\w./*-]+\.({SUFFIXES})(::\w+)?$", word)
        or re.match(r"(src|tests|benchmarks|docs|examples)/[\w./-]*$", word)
    ]


def exists(path):
    if path in FOREIGN:
        return True
    if "/" not in path:
        return path in FILES or (ROOT / path).exists()
    return any(any(start.glob(path)) for start in STARTS)


def missing_tests(page):
    """Return the tests (``file.py::name``) that do not exist; ``…::`` refers to the file named before."""
    found, file = [], None
    for path, name in re.findall(r"`([\w./]+\.py|…)::(\w+)`", prose(page)):
        file = file if path == "…" else path
        source = next((start / file for start in STARTS if (start / file).is_file()), None)
        if source is None or not re.search(rf"^(    )?def {name}\(", source.read_text(), re.MULTILINE):
            found.append(f"{file}::{name}")
    return found


@pytest.fixture(params=PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def page(request):
    return request.param


def test_relative_links_lead_to_a_file_and_a_heading(page):
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_named_paths_exist(page):
    assert [path for path in named_paths(page) if not exists(path)] == []


def test_named_tests_exist(page):
    assert missing_tests(page) == []


def test_the_check_finds_links_paths_and_tests(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One: a heading\n[a](b.md#c)\n`python src/memfit/nowhere.py` `gone.py::test_x` `…::test_y`\n"
        "```\n[x](y)\n```\n"
    )
    assert links(page) == ["b.md#c"]
    assert anchors(page) == {"one-a-heading"}
    assert named_paths(page) == ["src/memfit/nowhere.py", "gone.py"]
    assert not exists("src/memfit/nowhere.py")
    assert not exists("gone.py")
    assert missing_tests(page) == ["gone.py::test_x", "gone.py::test_y"]


def test_every_page_of_the_docs_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    pages = [page for page in ROOT.glob("docs/*.md") if page.name != "README.md"]
    assert [page.name for page in pages if f"({page.name})" not in index] == []
    decisions = (ROOT / "docs/decisions/README.md").read_text()
    records = ROOT.glob("docs/decisions/0*.md")
    assert [page.name for page in records if f"({page.name})" not in decisions] == []


def test_every_example_is_in_the_index():
    index = (ROOT / "examples/README.md").read_text()
    assert [path.name for path in ROOT.glob("examples/*.py") if f"({path.name})" not in index] == []


def test_the_limits_are_short():
    """Each of them on its own, in at most 60 words."""
    text = (ROOT / "docs/limits.md").read_text()
    bullets = re.findall(r"^- (.+(?:\n  .+)*)", text, re.MULTILINE)
    assert len(bullets) > 40
    assert [bullet[:60] for bullet in bullets if len(bullet.split()) > 60] == []
