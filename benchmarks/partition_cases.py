"""The methods that the benchmark of partitioners compares, and an expectation that is plotted with them."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.graph_access.simple_graph import open_simple_graph
from lightning_gnnscale.partitioner.metis import kaminpar_is_installed, metis_is_installed
from lightning_gnnscale.partitioner.registry import complete_options

from .graphs import GraphFile
from .grem_expectation import expected_greedy_cut
from .partition_process import core_count

GREEDY_EXPECTATION = "greedy_expectation"  # not a partitioner: what GREM's paper expects of fixed greedy streaming
PEERS = {"metis": metis_is_installed, "kaminpar": kaminpar_is_installed}


@dataclass(frozen=True)
class MethodSpec:
    """One line of the comparison.

    Attributes:
        name: in rows and tables.
        family: the name before a list of values was spread over several methods.
        method: name of the partitioner.
        options: its own, as given.
        balance: constraints, or None for the method's default.
    """

    name: str
    family: str
    method: str
    options: dict = field(default_factory=dict)
    balance: dict | None = None


def options_of(spec: MethodSpec, cores: int | str) -> dict:
    """Return a method's options, with `threads` set to the cores where it takes threads and none are given."""
    takes_threads = "threads" in complete_options(spec.method, {})
    return {"threads": core_count(cores), **spec.options} if takes_threads else spec.options


def resolve_methods(given: list[str | Mapping]) -> list[MethodSpec]:
    """Check the methods of the configuration, and spread options that are lists of values.

    Args:
        given: names of partitioners, or {method, name, balance, num_machines, and options of the method}.

    Raises:
        ValueError: an unknown method or option, or two methods of one name and other settings.
    """
    specs = [spec for one in given for spec in _resolve(one)]
    for name in {spec.name for spec in specs}:
        if sum(spec.name == name for spec in specs) > 1:
            raise ValueError(f"bench.methods has {name!r} more than once: give each a name of its own (name: ...)")
    return specs


def leave_out_missing_peers(specs: list[MethodSpec], tell) -> list[MethodSpec]:
    """Drop METIS and KaMinPar where they are not installed, and say so."""
    missing = [name for name, is_installed in PEERS.items() if not is_installed()]
    for name in missing:
        if any(spec.method == name for spec in specs):
            tell(f"{name} is left out: it is not installed (extra \\[{name}])")
    return [spec for spec in specs if spec.method not in missing]


def _resolve(given: str | Mapping) -> Iterator[MethodSpec]:
    if isinstance(given, str):
        given = {"method": given}
    options = dict(given)
    method = options.pop("method", None)
    if method is None:
        raise ValueError(f"bench.methods: {dict(given)} has no method")
    family, balance = options.pop("name", method), options.pop("balance", None)
    if method != GREEDY_EXPECTATION:
        complete_options(method, {key: value for key, value in options.items() if key != "num_machines"})
    elif "chunk_edges_share" not in options or not set(options) <= {"chunk_edges_share", "ends", "refine", "draws"}:
        takes = "chunk_edges_share, and ends, refine and samples if wished"
        raise ValueError(f"bench.methods: {GREEDY_EXPECTATION} takes {takes}, got {', '.join(options) or 'nothing'}")
    spread = [key for key, value in options.items() if isinstance(value, list)]
    for values in itertools.product(*(options[key] for key in spread)):
        chosen = dict(zip(spread, values, strict=True))
        suffix = "".join(f" {value}" if len(chosen) == 1 else f" {key}={value}" for key, value in chosen.items())
        yield MethodSpec(family + suffix, family, method, {**options, **chosen}, balance)


class GreedyExpectation:
    """Expected cuts on one graph. The reference is METIS' partition of the whole graph, made once per number of parts.

    Args:
        graph: The edge file.
        seed: Seed of METIS and of the samples.
    """

    def __init__(self, graph: GraphFile, seed: int):
        self._seed, self._references = seed, {}
        self._stream = open_edge_stream(graph.path, num_nodes=graph.num_nodes, layout=graph.layout, **graph.reader)
        with _quiet():
            self._simple = open_simple_graph(self._stream)[0]

    def cut(self, num_parts: int, options: dict) -> float:
        """Return the expected share of cut edges; options are chunk_edges_share and others of `expected_greedy_cut`.

        Raises:
            GNNScaleError: METIS is not installed.
        """
        with _quiet():
            if num_parts not in self._references:
                found = partition(self._stream, "metis", num_parts, seed=self._seed, evaluate=False)
                self._references[num_parts] = found.part_id
            given = {"seed": self._seed, "graph": self._simple, **options}
            return expected_greedy_cut(self._stream, self._references[num_parts], num_parts, **given)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
