"""A partition store in plain Python sets and lists, written from what `PartitionStore` promises; original ids."""

from collections import Counter

from lightning_gnnscale.rng import combine_array


class StoreOracle:
    """The whole graph as rows of (source, edge id), and the parts cut from it."""

    def __init__(self, edges, part_id, to_undirected=False, remove_self_loops=False, seed=0):
        self.part_id = [int(part) for part in part_id]
        self.seed = seed
        self.rows = {node: [] for node in range(len(part_id))}
        for edge_id, (u, v) in enumerate(edges):
            if u == v and remove_self_loops:
                continue
            self.rows[v].append((u, edge_id))
            if to_undirected and u != v:
                self.rows[u].append((v, edge_id))
        if to_undirected:
            listed = {}
            for edge_id, edge in enumerate(edges):
                listed.setdefault(tuple(edge), edge_id)
            for v, row in self.rows.items():
                self.rows[v] = [(u, listed.get((u, v), listed.get((v, u)))) for u in {u for u, _ in row}]
        for row in self.rows.values():
            row.sort()

    @property
    def num_edges(self):
        return sum(len(row) for row in self.rows.values())

    @property
    def symmetric(self):
        edges = Counter((u, v) for v, row in self.rows.items() for u, _ in row)
        return all(edges[v, u] == count for (u, v), count in edges.items())

    def core(self, part):
        return [node for node, owner in enumerate(self.part_id) if owner == part]

    def part(self, part, hops):
        """Return (set of halo nodes, {node: sorted [(source, edge id)]} of core and halo nodes)."""
        if hops == 0:
            return self._without_halo(part)
        distance = dict.fromkeys(self.core(part), 0)
        for step in range(1, hops + 1):
            for node in [node for node, d in distance.items() if d == step - 1]:
                for source, _ in self.rows[node]:
                    distance.setdefault(source, step)
        rows = {}
        for node, d in distance.items():
            rows[node] = [(u, e) for u, e in self.rows[node] if d < hops or distance.get(u, hops) < hops]
        return {node for node, d in distance.items() if d > 0}, rows

    def _without_halo(self, part):
        kept = {
            node: [(u, e) for u, e in row if self._belongs(u, node, part)]
            for node, row in self.rows.items()
        }  # fmt: skip
        core = set(self.core(part))
        halo = {u for node in core for u, _ in kept[node]} - core
        rows = {node: kept[node] for node in core}
        rows |= {node: [(u, e) for u, e in kept[node] if u in core] for node in halo}
        return halo, rows

    def _belongs(self, u, v, part):
        owners = self.part_id[u], self.part_id[v]
        if owners[0] == owners[1]:
            return owners[0] == part
        low, high = min(u, v), max(u, v)
        bits = int(combine_array(combine_array(self.seed, low), high))
        return self.part_id[low if bits % 2 == 0 else high] == part
