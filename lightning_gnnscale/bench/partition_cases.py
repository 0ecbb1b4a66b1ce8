"""Which partitioner runs with which settings on which graph, and the row that each of these cases leaves."""

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..edge_stream import open_edge_stream
from ..partitioner import partition
from ..partitioner.graph_access.simple_graph import SimpleGraph, open_simple_graph
from ..partitioner.grem_expectation import expected_greedy_cut
from ..partitioner.kaminpar import kaminpar_is_installed
from ..partitioner.metis import metis_is_installed
from ..partitioner.registry import complete_options
from .graphs import GraphFile
from .partition_process import core_count
from .runner import digest_of_text

GREEDY_EXPECTATION = "greedy_expectation"  # no partitioner: what GREM's paper expects of fixed greedy streaming
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


@dataclass(frozen=True)
class Settings:
    """What all cases of one benchmark share.

    Attributes:
        balance: constraints of every method that has none of its own; None: the methods' defaults.
        cores: 1, another number, or "all".
        repeats, chunk_edges, seed, halo_hops, feature_bytes: see `partition_process.measure`.
        limit_s, limit_bytes: a case is stopped there.
    """

    balance: dict | None = None
    cores: int | str = 1
    repeats: int = 1
    chunk_edges: int = 1 << 18
    seed: int = 0
    halo_hops: int = 1
    feature_bytes: int = 512
    limit_s: float | None = None
    limit_bytes: int | None = None

    def key(self, spec: MethodSpec, source: dict) -> str:
        """Return a digest of all that decides a row beside graph, method and parts."""
        kept = [self.cores, self.chunk_edges, self.seed, self.halo_hops, self.feature_bytes]
        facts = [spec.method, spec.options, spec.balance or self.balance, source, kept]
        return digest_of_text(json.dumps(facts, sort_keys=True, default=str))

    def measured(self, spec: MethodSpec) -> dict:
        """Return what `partition_process.measure` takes of these settings and a method."""
        names = ("limit_s", "limit_bytes", "chunk_edges", "repeats", "seed", "halo_hops", "feature_bytes")
        own = {"options": self.options_of(spec), "balance": spec.balance or self.balance}
        return {name: getattr(self, name) for name in names} | own

    def options_of(self, spec: MethodSpec) -> dict:
        """Return a method's options, with `threads` set to the cores where it takes threads and none are given."""
        takes_threads = "threads" in complete_options(spec.method, {})
        return {"threads": core_count(self.cores), **spec.options} if takes_threads else spec.options


def resolve_methods(given: list[str | Mapping]) -> list[MethodSpec]:
    """Check the methods of the configuration, and spread options that are lists of values.

    Args:
        given: names of partitioners, or {method, name, balance, and options of the method}.

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
        complete_options(method, options)
    elif "chunk_edges_share" not in options or not set(options) <= {"chunk_edges_share", "ends", "draws"}:
        takes = "chunk_edges_share, and ends and draws if wished"
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
        seed: Seed of METIS and of the draws.
    """

    def __init__(self, graph: GraphFile, seed: int):
        self.graph, self.seed = graph, seed
        self._simple: SimpleGraph | None = None
        self._references: dict = {}

    def cut(self, num_parts: int, options: dict) -> float:
        """Return the expected share of cut edges.

        Args:
            num_parts: number of parts.
            options: chunk_edges_share and others of `expected_greedy_cut`.

        Raises:
            GNNScaleError: METIS is not installed.
        """
        stream = open_edge_stream(
            self.graph.path, num_nodes=self.graph.num_nodes, layout=self.graph.layout, **self.graph.reader
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if self._simple is None:
                self._simple = open_simple_graph(stream)[0]
            if num_parts not in self._references:
                found = partition(stream, "metis", num_parts, seed=self.seed, evaluate=False)
                self._references[num_parts] = found.part_id
        return expected_greedy_cut(
            stream, self._references[num_parts], num_parts, seed=self.seed, graph=self._simple, **options
        )
