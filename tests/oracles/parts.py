"""Parts cut from a small graph in plain Python: what a partition store hands to samplers and loaders."""

from dataclasses import dataclass, fields, replace

import numpy as np

from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader
from lightning_gnnscale.loader.staged_part import node_values
from lightning_gnnscale.partition_store import DenseFeatures, PackedFeatures
from lightning_gnnscale.partition_store.part_graph import PartGraph
from lightning_gnnscale.triton_kernels.gather_rows import RowCode

from .gather_rows import decode_codes_reference, encode_codes_reference


@dataclass
class SmallWorld:
    """A graph in store order with everything that a loader takes."""

    csc: CSC
    part_offsets: np.ndarray
    features: DenseFeatures
    labels: np.ndarray
    masks: dict[str, np.ndarray]

    @property
    def num_parts(self) -> int:
        return len(self.part_offsets) - 1

    def load_part(self, part: int) -> PartGraph:
        """Core rows complete; halo rows hold their neighbours in the core."""
        start, end = (int(offset) for offset in self.part_offsets[part : part + 2])
        rows = [list(self.csc.indices[self.csc.indptr[v] : self.csc.indptr[v + 1]]) for v in range(start, end)]
        halo = sorted({int(u) for row in rows for u in row if not start <= u < end})
        for h in halo:
            row = self.csc.indices[self.csc.indptr[h] : self.csc.indptr[h + 1]]
            rows.append([u for u in row if start <= u < end])
        local = {v: i for i, v in enumerate([*range(start, end), *halo])}
        edges = []
        for v in [*range(start, end), *halo]:
            inside = range(int(self.csc.indptr[v]), int(self.csc.indptr[v + 1]))
            edges += [a for a in inside if start <= v < end or start <= self.csc.indices[a] < end]
        indptr = np.cumsum([0] + [len(row) for row in rows])
        indices = np.array([local[int(u)] for row in rows for u in row], np.int32)
        nodes = np.array([*range(start, end), *halo])
        degree = np.diff(self.csc.indptr)[nodes]
        csc = CSC(indptr, indices)
        return PartGraph(part, start, end - start, np.array(halo, np.int64), csc, degree, np.array(edges, np.int64))

    def packed_features(self) -> PackedFeatures:
        """Halo rows packed, those of part p times 2 ** (p + 1): a row says where it was read."""
        halos = [self.load_part(part).halo_nodes for part in range(self.num_parts)]
        rows = [np.ldexp(self.features.array[halo], part + 1) for part, halo in enumerate(halos)]
        offsets = np.cumsum([0, *map(len, halos)])
        packed = DenseFeatures(np.concatenate(rows))
        return PackedFeatures(self.features, packed, self.part_offsets, offsets, np.concatenate(halos))

    def rows_read(self, part: int, nodes: np.ndarray) -> np.ndarray:
        """What a part reads of `packed_features` for nodes that it sees."""
        start, end = self.part_offsets[part : part + 2]
        foreign = (nodes < start) | (nodes >= end)
        return np.ldexp(self.features.array[nodes], (foreign * (part + 1))[:, None])

    def quantised(self, bits: int) -> tuple["SmallWorld", "SmallWorld"]:
        """The same world with its features as codes, and one with what they decode to as plain float32."""
        code = RowCode(self.features.dim, bits)
        raw = encode_codes_reference(self.features.array, code)
        plain = DenseFeatures(decode_codes_reference(raw, code))
        return replace(self, features=DenseFeatures(raw, code)), replace(self, features=plain)

    def packed_codes(self) -> PackedFeatures:
        """The codes of a `quantised` world, halo rows packed; those of part p have the scale times 2 ** (p + 1)."""
        halos = [self.load_part(part).halo_nodes for part in range(self.num_parts)]
        rows = [self.features.array[halo] for halo in halos]
        for part, copied in enumerate(rows):
            if self.features.storage.bits == 16:
                values = decode_codes_reference(copied, self.features.storage) * np.float32(2.0 ** (part + 1))
                copied[:] = encode_codes_reference(values, self.features.storage)
                continue
            copied[:, :4] = np.ldexp(copied[:, :4].copy().view(np.float32), part + 1).view(np.uint8)
        packed = replace(self.features, array=np.concatenate(rows))
        offsets = np.cumsum([0, *map(len, halos)])
        return PackedFeatures(self.features, packed, self.part_offsets, offsets, np.concatenate(halos))

    def targets(self, part: int) -> np.ndarray:
        start, end = self.part_offsets[part : part + 2]
        return start + np.flatnonzero(self.masks["train"][start:end])


def small_world(num_nodes=300, num_edges=2400, num_parts=3, dim=16, seed=0, both_ways=True) -> SmallWorld:
    """Return a random graph with a few hubs, cut into ranges of uneven size."""
    rng = np.random.default_rng(seed)
    src = (rng.random(num_edges) ** 3 * num_nodes).astype(np.int64)
    dst = rng.integers(0, num_nodes, num_edges)
    if both_ways:
        src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    pairs = np.unique(np.stack([dst, src]), axis=1)
    csc = build_csc(pairs[1], pairs[0], num_nodes)
    cuts = np.sort(rng.choice(np.arange(1, num_nodes), num_parts - 1, replace=False))
    roles = rng.choice(["train", "val", "test"], num_nodes, p=[0.6, 0.2, 0.2])
    return SmallWorld(
        csc,
        np.array([0, *cuts, num_nodes]),
        DenseFeatures(rng.random((num_nodes, dim), np.float32)),
        rng.integers(0, 5, num_nodes),
        {name: roles == name for name in ("train", "val", "test")},
    )


def part_loader(parts, load_part, features, targets, sampler, **given) -> PartLoader:
    """Return a loader; each keyword goes to its columns, to its data, to its options, or to the loader."""

    def taken(kind) -> dict:
        return {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}

    nodes = node_values(given.pop("labels", None), given.pop("masks", {})) | given.pop("nodes", {})
    edges = given.pop("edges", {})
    data = PartData(load_part, features, nodes, edges, **taken(PartData))
    return PartLoader(parts, data, targets, sampler, LoaderOptions(**taken(LoaderOptions)), **given)
