"""Every block of code in README and docs/ runs: Python on a small graph, commands as far as their settings go."""

import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import duckdb
import lightning as L
import numpy as np
import pyarrow as pa
import pytest
from omegaconf import OmegaConf

import lightning_gnnscale as gs
from lightning_gnnscale.cli.compose import compose_config, written
from lightning_gnnscale.partitioner import registry
from tests.tiers import first

cli = importlib.import_module("lightning_gnnscale.cli.main")  # the package's `main` is its function
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A fence may hang below a mark of its own: `<!-- slow -->` runs what it says, whole, where slow tests run.
FENCE = re.compile(r'^(<!-- slow -->\n)?```(\w*)(?: title="([\w./]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NUM_NODES, NUM_CLASSES = 240, 4


class Block(NamedTuple):
    """A block of code of a page.

    Attributes:
        language: python, bash, yaml or text.
        title: File that the block is; "" where it is none.
        code: Its lines.
        slow: Whether it is also run as it stands.
    """

    language: str
    title: str
    code: str
    slow: bool


def blocks_of(page: Path) -> list[Block]:
    found = FENCE.findall(page.read_text())
    return [Block(language, title, code, bool(slow)) for slow, language, title, code in found]


def pages_with(language: str, slow: bool = False) -> list:
    pages = [page for page in PAGES if any(b.language == language and b.slow >= slow for b in blocks_of(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that pages speak of, out of which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_PARTITIONERS", dict(registry._PARTITIONERS))
    modules = set(sys.modules)
    write_graph()
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def write_graph() -> None:
    """Write a graph of planted classes: edges, features, labels and masks in the forms that pages name."""
    random = np.random.default_rng(0)
    labels = random.permutation(np.arange(NUM_NODES) % NUM_CLASSES)
    src, dst = random.integers(NUM_NODES, size=(2, 12 * NUM_NODES))
    alike = (labels[src] == labels[dst]) | (random.random(len(src)) < 0.1)
    edges = np.stack([src[alike], dst[alike]])
    features = (np.eye(16)[labels] + random.normal(0, 1, (NUM_NODES, 16))).astype(np.float32)
    masks = dict(
        zip(("train", "val", "test"), np.eye(3, dtype=bool)[random.integers(3, size=NUM_NODES)].T, strict=True)
    )
    arrays = {"edges": edges, "features": features, "x": features, "labels": labels, "y": labels, **masks}
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    stream = gs.open_edge_stream(edges, num_nodes=NUM_NODES)
    for name in ("edges.csv", "edges.parquet", "edges.bin"):
        gs.write_edges(stream, name)
    with duckdb.connect("graph.db") as database:
        database.from_arrow(pa.table({"src": edges[0], "dst": edges[1]})).create("follows")
        people = {"id": np.arange(NUM_NODES), "label": labels, "a": features[:, 0], "b": features[:, 1]}
        database.from_arrow(pa.table(people)).create("people")
    kinds = ["runtime", "build", "test"]
    lines = [f"p{src},p{dst},{kinds[at % 3]}\n" for at, (src, dst) in enumerate(edges.T)]
    Path("deps.csv").write_text("package,requires,kind\n" + "".join(lines))
    rows = zip(labels, *features[:, :2].T, strict=True)
    packages = [f"p{node},{label},{size},{age}\n" for node, (label, size, age) in enumerate(rows)]
    Path("packages.csv").write_text("id,category,size,age\n" + "".join(packages))
    Path("papers.csv").write_text("id,label,x0,x1\n" + "".join(packages))
    Path("people.csv").write_text("id\n" + "".join(f"a{number}\n" for number in range(40)))
    Path("writes.csv").write_text("".join(f"a{dst % 40},p{dst}\n" for dst in range(NUM_NODES)))
    Path("cites.csv").write_text("".join(f"p{src},p{dst}\n" for src, dst in edges.T))
    split = np.choose(masks["val"] + 2 * masks["test"], ["train", "val", "test"])
    rows = zip(np.arange(NUM_NODES), labels, split, *features[:, :3].T, strict=True)
    Path("nodes.csv").write_text("id,label,split,x0,x1,x2\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    for run in ("demo", "sdt_gnn"):
        folder = Path(f"runs/{run}/DATE")
        folder.mkdir(parents=True)
        OmegaConf.save(OmegaConf.create(written(compose_config("train", []))), folder / "config.yaml")


def write_files(blocks: list[Block]) -> None:
    for block in blocks:
        if block.title:
            Path(block.title).write_text(block.code)


def shrink(trainer_init):
    """Return `Trainer.__init__` that trains one epoch in this process, whatever the page asks for."""

    @functools.wraps(trainer_init)
    def init(self, *args, **options):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        return trainer_init(self, *args, **{**options, **quiet, "devices": 1, "max_epochs": 1, "accelerator": "cpu"})

    return init


def run_python(page: Path) -> None:
    blocks = blocks_of(page)
    write_files(blocks)
    if 'root="stores/mine"' not in page.read_text():
        start = ROOT / "README.md"
        ten_lines = next(block.code for block in blocks_of(start) if block.language == "python")
        exec(compile(ten_lines.split("model =")[0], str(start), "exec"), {})
    names = {"__name__": "a_page"}
    for block in blocks:
        if block.language == "python" and block.title:
            importlib.import_module(Path(block.title).stem)
        elif block.language == "python":
            exec(compile(block.code, str(page), "exec"), names)


@first(2)
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page, folder, monkeypatch):
    monkeypatch.setattr(L.Trainer, "__init__", shrink(L.Trainer.__init__))
    run_python(page)


def lines_of(code: str) -> list[list[str]]:
    """Return the words of each line of a shell block, lines that go on joined, comments left out."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def check_line(words: list[str], composed: list) -> None:
    program, *rest = words
    if re.match(r"\w+=", program):  # a variable of a script
        return
    if program == "srun":
        program, *rest = rest[next(at for at, word in enumerate(rest) if not word.startswith("-")) :]
    if program == "torchrun":
        program, *rest = rest[rest.index("--no-python") + 1 :]
    if program == "gnnscale":
        before = len(composed)
        try:
            cli.main(rest)
        except SystemExit as end:
            assert not end.code, f"{shlex.join(words)} is refused"
        assert len(composed) > before or rest[0] == "completion", f"{shlex.join(words)} runs nothing"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
        known = re.search(r"optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
        asked = {name for names in extras for name in names.split(",")}
        assert asked <= set(re.findall(r"^(\w+) =", known, re.MULTILINE))
    elif program == "python":
        assert rest[0] in ("-m", "-c") or Path(rest[0]).is_file(), f"no block is titled {rest[0]}"
    else:
        assert program in ("ray", "source", "eval", "tensorboard", "sleep"), (
            f"{program} is a program that no test knows"
        )


@first(4)
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_are_taken(page, folder, composed):
    blocks = blocks_of(page)
    write_files(blocks)
    for block in blocks:
        for words in lines_of(block.code) if block.language == "bash" else ():
            check_line(words, composed)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("bash", slow=True))
def test_commands_run(page, folder):
    """What is marked runs as it stands, in processes of its own, as many as it asks for."""
    blocks = blocks_of(page)
    write_files(blocks)
    paths = os.pathsep.join([str(ROOT), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block in blocks:
        if block.language == "bash" and block.slow:
            script = ["bash", "-euc", block.code]
            ran = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
            assert ran.returncode == 0, block.code + ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook, folder):
    nbclient = pytest.importorskip("nbclient", reason="the extra [docs] is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra [docs] is not installed")
    cells = nbformat.read(notebook, as_version=4)
    os.environ["PYTHONPATH"] = str(ROOT)
    nbclient.NotebookClient(cells, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_what_they_are(page):
    fences = re.findall(r"^ *```.*$", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks_of(page)), "a fence stands within a list, or none closes it"
    for block in blocks_of(page):
        assert block.language in ("python", "bash", "yaml", "text", "mermaid")
        assert block.language != "yaml" or block.title, "a recipe has a file name, by which a command takes it"
