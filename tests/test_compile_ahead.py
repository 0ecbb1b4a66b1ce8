"""What commands need is compiled ahead: the list is true, what is missing is found, and compiled once."""

import io
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from lightning_gnnscale import compile_ahead, kernel_sets, memory
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.main import kernel_sets_of
from lightning_gnnscale.cli.recipes import recipes_folder
from lightning_gnnscale.kernel_sets import missing, of_sets, recorded
from lightning_gnnscale.report import terminal
from tests import record_kernels


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and nothing that compiles ahead of this process."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_sets, "_started", None)
    monkeypatch.setattr(kernel_sets, "_compiled", set())
    kernel_sets.compiled_list.cache_clear()
    yield tmp_path / "cache" / "lightning_gnnscale"
    kernel_sets.compiled_list.cache_clear()


def test_each_kernel_of_the_list_is_there_and_its_types_can_be_read():
    for kernel in recorded():
        dispatcher, types = compile_ahead.object_of(kernel.name), compile_ahead.types_of(kernel.types)
        assert compile_ahead.types_text(types) == kernel.types
        assert 0 < len(types) <= len(dispatcher.py_func.__code__.co_varnames), kernel
        assert compile_ahead.entry_of(kernel) is not None
        assert set(kernel.sets) <= set(record_kernels.SETS), kernel
    assert len({kernel[:2] for kernel in recorded()}) == len(recorded())
    assert {name for kernel in recorded() for name in kernel.sets} == set(record_kernels.SETS)


# Compilations that a first command waits for. A number here is lowered when kernels go, and raised for nothing.
CEILINGS = {"demo": 107, "partition:spring": 17, "partition:streaming_multilevel": 40}


def test_no_command_comes_to_need_more_kernels():
    demo = kernel_sets_of("train", compose_config("demo", [], str(recipes_folder())))
    assert demo == ["store", "partition:streaming_multilevel", "synthetic", "train"]
    found = {name: len(of_sets(demo if name == "demo" else [name])) for name in CEILINGS}
    assert {name: number for name, number in found.items() if number > CEILINGS[name]} == {}


def test_a_run_compiles_nothing_beside_the_list(tmp_path):
    known = {kernel[:2] for kernel in of_sets(["synthetic", "partition:streaming_multilevel", "store", "train"])}
    small = [*record_kernels.SMALL, "trainer.devices=1", "trainer.limit_train_batches=2", "num_parts=2"]
    calls = record_kernels.used_by([*record_kernels.DEMO, *small], tmp_path, cache=None)
    used = {(call["name"], call["types"]) for call in calls}
    assert len(used) > 30
    assert used <= known, "make kernels"


@pytest.mark.parametrize(
    ("command", "recipe", "words", "sets"),
    [
        ("partition", "demo", ["partitioner=spring"], ["store", "partition:spring", "synthetic"]),
        ("train", "demo", ["store=stores/some"], ["train"]),
        ("test", "cora", [], ["store", "partition:streaming_multilevel", "train"]),
        ("train", "link_prediction", [], ["store", "partition:spring", "links"]),
        ("train", "hgt_mag_shape", [], ["store", "partition:spring", "hetero"]),
        ("train", "cagnet", [], ["store", "partition:spring", "full_graph"]),
        ("inspect", "demo", [], []),
        ("prepare", "demo", [], ["train"]),
    ],
)
def test_the_sets_of_a_command(command, recipe, words, sets):
    assert kernel_sets_of(command, compose_config(recipe, words, str(recipes_folder()))) == sets


def test_what_is_missing_is_known_without_numba(fresh):
    program = (
        "import sys; from lightning_gnnscale.kernel_sets import missing, of_sets;"
        "kernels = of_sets(['train']); assert missing(kernels) == kernels and len(kernels) > 20;"
        "assert not {'numba', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_compiled_ahead_once_and_known_from_then_on(fresh, monkeypatch, capfd):
    kernel = min(of_sets(["partition:spring"]), key=lambda one: one.seconds)
    ahead = kernel_sets.Ahead(["partition:spring"], tell=True)
    assert kernel_sets.running() is None, "nobody asked for it through `compile_ahead`"
    ahead.wait()
    number = len(of_sets(["partition:spring"]))
    assert (ahead.total, ahead.done, ahead.ended) == (number, number, True)
    assert capfd.readouterr().err.startswith(f"compiling {number} kernels for this machine, about ")
    assert len(list(fresh.glob("*.kernel"))) >= number
    assert missing(of_sets(["partition:spring"])) == []
    monkeypatch.setenv(kernel_sets.SWITCH, "1")
    monkeypatch.setattr(kernel_sets, "Ahead", None)  # a process would be an error
    assert kernel_sets.compile_ahead(["partition:spring"]) is None
    # An entry that is gone is missing again; one that exists and is not in the list of compiled ones is found.
    entry = compile_ahead.entry_of(kernel)
    content = entry.read_bytes()
    entry.unlink()
    assert missing(of_sets(["partition:spring"])) == [kernel]
    entry.write_bytes(content)
    kernel_sets.compiled_list().unlink()
    assert len(missing(of_sets(["partition:spring"]))) == number
    assert compile_ahead.still_missing(of_sets(["partition:spring"])) == []
    assert missing(of_sets(["partition:spring"])) == []


def test_nothing_is_compiled_ahead_where_it_is_not_wanted(fresh, monkeypatch):
    monkeypatch.setattr(kernel_sets, "Ahead", lambda names, tell: (names, tell))
    for name, value in ((kernel_sets.SWITCH, "0"), ("LOCAL_RANK", "1"), ("SLURM_LOCALID", "3")):
        monkeypatch.setenv(kernel_sets.SWITCH, "1")
        monkeypatch.setenv(name, value)
        assert kernel_sets.compile_ahead(["train"]) is None
        monkeypatch.delenv(name)
    monkeypatch.delenv(kernel_sets.SWITCH, raising=False)
    assert kernel_sets.compile_ahead(["train"]) is None, "not in a test that does not ask for it"
    monkeypatch.setenv(kernel_sets.SWITCH, "1")
    assert kernel_sets.compile_ahead(["no such set"]) is None
    assert kernel_sets.compile_ahead(["train"], tell=False) == (["train"], False)


def test_where_little_memory_is_free_it_is_waited_for(fresh, monkeypatch):
    monkeypatch.setenv(kernel_sets.SWITCH, "1")
    waited = []
    for free, waits in ((3 << 30, False), (1 << 30, True)):
        one = SimpleNamespace(wait=lambda: waited.append(1), update=lambda: None, ended=True)
        monkeypatch.setattr(kernel_sets, "Ahead", lambda names, tell, one=one: one)
        monkeypatch.setattr(memory, "free_memory_bytes", lambda free=free: free)
        assert kernel_sets.compile_ahead(["train"], tell=False) is one
        assert bool(waited) == waits


def test_who_compiles_ends_with_who_asked(fresh):
    program = (
        "import time; from lightning_gnnscale.kernel_sets import Ahead;"
        "ahead = Ahead(['train'], tell=False); print(ahead._first.pid, flush=True); time.sleep(99)"
    )
    asked = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    group = int(asked.stdout.readline())
    os.killpg(group, 0)
    asked.kill()
    asked.communicate()
    deadline = time.monotonic() + 120  # what is half compiled is finished, and imports before it
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("it still compiles")


def test_what_was_not_used_is_pruned(fresh):
    fresh.mkdir(parents=True)
    now = time.time()
    for name, days in (("new", 0), ("used", 20), ("old", 40)):
        (fresh / name).write_bytes(bytes(100))
        os.utime(fresh / name, (now - days * 86_400,) * 2)
    assert compile_ahead.prune() == 1
    assert sorted(path.name for path in fresh.iterdir()) == ["new", "used"]
    assert compile_ahead.prune(most_bytes=150) == 1
    assert [path.name for path in fresh.iterdir()] == ["new"]


def test_the_bar_of_what_compiles(monkeypatch):
    ahead = SimpleNamespace(total=None, done=0)
    monkeypatch.setattr(terminal, "running", lambda: ahead)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bars = terminal.ProgressBars(console)

    def shown() -> str:
        with console.capture() as capture:
            console.print(bars.get_renderable())
        return capture.get()

    with bars:
        assert "compiling" not in shown(), "while it looks for what is missing"
        ahead.total, ahead.done = 7, 3
        assert "compiling kernels, once" in shown() and "3/7" in shown()
        monkeypatch.setattr(terminal, "running", lambda: None)
        assert "compiling" not in shown()
