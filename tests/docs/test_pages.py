"""The docs build without a warning, hold every public name, and README stays a page that is read."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_gnnscale as gs

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^::: (\S+)\n    options: \{heading: gs\.(\S+), toc_label: \w+\}$", re.MULTILINE)
REFERENCE = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
NAMES = {shown: path for path, shown in DIRECTIVE.findall(REFERENCE)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs_jupyter", reason="the extra [docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.sweep
def test_docs_build_without_a_warning(site):
    assert (site / "index.html").is_file()


@pytest.mark.sweep
def test_every_public_name_has_its_place_on_the_built_pages(site):
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    missing = [path for path in NAMES.values() if f'id="{path}"' not in pages]
    assert not missing, f"no page has rendered {', '.join(missing)}"


def test_reference_holds_every_public_name():
    """What the package and its spaces of public names export, under the name that a user says."""
    spaces = {space: getattr(gs, space) for space in ("model", "strategy", "dataset")}
    public = {*gs.__all__, *(f"{space}.{name}" for space, module in spaces.items() for name in module.__all__)}
    shared = {f"{space}.{name}" for space in spaces for name in gs.__all__}
    missing = sorted(public - shared - set(NAMES))
    assert not missing, f"docs/reference leaves out {', '.join(missing)}"


@pytest.mark.parametrize("shown, path", NAMES.items(), ids=NAMES)
def test_a_name_of_the_reference_is_what_a_user_imports(shown, path):
    value = gs
    for part in shown.split("."):
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(f"{value.__name__}.{part}")
    space, _, name = path.rpartition(".")
    assert value is getattr(importlib.import_module(space), name)
    assert value.__doc__


def test_readme_is_a_page():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert len(links) > 10
    for link in links:
        assert link.startswith("http") or (ROOT / link).exists(), f"README links {link}, which is not there"


def test_every_page_is_reached_from_the_navigation():
    listed = set(re.findall(r": ([\w/]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    assert listed == {str(page.relative_to(docs)) for kind in ("md", "ipynb") for page in docs.rglob(f"*.{kind}")}


def script(name: str):
    """Return a script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_reads_where_the_page_stands():
    names = script("names")
    assert names.PAGE.read_text() == names.page(), "say: python docs/names.py"
    listed = re.findall(r"^- \*\*`gs\.([\w.]+)", names.PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


@pytest.mark.parametrize("name", ["headline", "partitioners"])
def test_the_pictures_are_of_the_measured_rows(name):
    drawn = script(name)
    assert drawn.PICTURE.read_text() == drawn.picture(), f"say: python docs/{name}.py"
