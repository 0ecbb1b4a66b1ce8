"""Digests of what the package makes: stores, first batches, weights and predictions of every recipe at a small size.

    python -m tests.digests OUT.json [--compare BEFORE.json] [--only NAME ...]

Two states of the code that should make the same are compared: the first writes BEFORE.json, the second reads it.
Names of the package are left out wherever they could change, so that a renaming changes no digest.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

BATCHES = 3
TOY = [
    "dataset.num_nodes=3000",
    "dataset.num_edges=20000",
    "dataset.num_communities=40",
    "dataset.feature_dim=16",
    "num_parts=4",
    "datamodule.batch_size=128",
]
ONE = ["trainer.devices=1", "num_parts=2"]
TWO = ["trainer.devices=2", "num_parts=2"]
TYPED = ["recipe=temporal_sage", "dataset.num_users=600", "dataset.num_items=150"]
ANY_TIME = ["sampler.temporal_strategy=null", "sampler.strictly_before=false"]
ALWAYS = ["trainer.max_epochs=1", "trainer.check_val_every_n_epoch=1", "callbacks=default", "trainer.accelerator=cpu"]
# Learned rows of several processes are written without locks, and Ray's workers answer in any order: one process each.
RUNS = {
    "armada": ["recipe=armada", "dataset.name=cora", "source.num_workers=1", *ONE],
    "armada_embeddings": ["recipe=armada_embeddings", "dataset.name=cora", "source.num_workers=1", *ONE],
    "bytegnn": ["recipe=bytegnn", "dataset.name=cora", *ONE],
    "cagnet": ["recipe=cagnet", "dataset.name=cora", *ONE],
    "cluster_gcn": ["recipe=cluster_gcn", "dataset.name=cora", "sampler.num_clusters=20", *ONE],
    "coded_deltas": ["recipe=quantised_deltas", "dataset.name=cora", *ONE],
    "complex_wn18rr": ["recipe=complex_wn18rr", *ONE],
    "control_variates": ["recipe=control_variates", "dataset.name=cora", *ONE],
    "cora": ["recipe=cora", *ONE],
    "data_placement": ["recipe=data_placement", *ONE],
    "demo": ["recipe=demo", *TOY, "trainer.devices=1"],
    "distdgl": ["recipe=distdgl", "dataset.name=cora", *ONE],
    "distmult_fb15k237": ["recipe=distmult_fb15k237", *ONE],
    "embeddings": ["recipe=embeddings", "dataset.name=cora", *ONE],
    "gpu": ["recipe=gpu", "dataset.name=cora", *ONE],
    "grappa": ["recipe=grappa", "dataset.name=cora", "trainer.devices=1", "strategy.logical_ranks=2", "num_parts=4"],
    "graphsaint": ["recipe=graphsaint", "dataset.name=cora", *ONE],
    "halo_int8": ["recipe=halo_int8", "dataset.name=cora", *TWO],
    "hgt_mag_shape": ["recipe=hgt_mag_shape", "dataset.num_nodes=3000", "dataset.num_edges=20000", *ONE],
    "link_prediction": ["recipe=link_prediction", *ONE],
    "locality_layerwise": ["recipe=locality_layerwise", *ONE],
    "locality_sampling": ["recipe=locality_sampling", *ONE],
    "rgcn_fb15k237": ["recipe=rgcn_fb15k237", *ONE],
    "sancus": ["recipe=sancus", "dataset.name=cora", *ONE],
    "sdt_gnn": ["recipe=sdt_gnn", "dataset.name=cora", *ONE],
    "temporal_sage": [*TYPED, *ONE],
    "unsupervised_sage": ["recipe=unsupervised_sage", *ONE],
    # What no recipe asks of a sampler, a store or a source.
    "disjoint": [*TYPED, "sampler.disjoint=true", "sampler.temporal_strategy=last", *ONE],
    "induced": [*TYPED, "sampler.subgraph_type=induced", *ANY_TIME, *ONE],
    "packed": ["recipe=demo", *TOY, "pack_halo=true", "source=processes", "trainer.devices=1"],
    "quantised": ["recipe=demo", *TOY, "feature_storage=int8", "evaluation=sampled", "trainer.devices=1"],
    "rgat": [*TYPED, "model=rgat", "feature_storage=float16", *ONE],
    "two_way": [*TYPED, "sampler.subgraph_type=bidirectional", *ANY_TIME, *ONE],
    "whole_graph": ["recipe=demo", *TOY, "datamodule.scope=graph", "partitioner=range", "trainer.devices=1"],
}


class Recorder(L.Callback):
    """Writes the digests of a fit: its first batches and the weights at its end.

    Args:
        path: file that the first process writes.
    """

    def __init__(self, path: str):
        self.path = path
        self.batches: list[list[str]] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        """Take the digest of one of the first batches."""
        if len(self.batches) < BATCHES:
            self.batches.append(sorted(digest_of(array) for array in arrays_of(batch)))

    def on_fit_end(self, trainer, module):
        """Write the digests, weights in the order of their definition."""
        if trainer.is_global_zero:
            weights = [digest_of(value.detach().cpu().numpy()) for value in module.state_dict().values()]
            Path(self.path).write_text(json.dumps({"batches": self.batches, "weights": weights}))


def arrays_of(value: Any, seen: dict[int, Any] | None = None) -> Iterator[np.ndarray]:
    """Yield the arrays in a batch, whatever the names under which they are kept."""
    seen = {} if seen is None else seen  # which keeps what it names: an id is used again
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield (value.coalesce().values() if value.layout == torch.sparse_coo else value).detach().cpu().numpy()
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from arrays_of(one, seen)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from arrays_of(one, seen)
    elif hasattr(value, "stores"):  # PyG's Data and HeteroData
        for store in value.stores:
            yield from arrays_of(dict(store.items()), seen)
    elif hasattr(value, "__dict__"):
        yield from arrays_of(vars(value), seen)


def digest_of(array: np.ndarray) -> str:
    """Return what tells an array from others: its type, shape and bytes."""
    text = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(text + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def digests_of_store(folder: Path) -> dict[str, str] | list[str]:
    """Return the digest of each file of a store; of a typed one, whose files may be called otherwise, of its arrays."""
    paths = [folder / "manifest.json", *folder.glob("*.npy")]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(paths)}
    is_typed = "schema" in json.loads(paths[0].read_text())
    return sorted(found[path.name] for path in paths[1:]) if is_typed else found


def digests_of_run(words: list[str], folder: Path, generated: Path) -> dict[str, Any]:
    """Train as a recipe says, at a small size, and return the digests of what came of it."""
    from lightning_gnnscale.cli.main import main

    stores, run, recorded = folder / "stores", folder / "run", folder / "recorded.json"
    recorder = f"+callbacks.digests={{_target_: tests.digests.Recorder, path: {recorded}}}"
    places = [f"paths.stores={stores}", f"hydra.run.dir={run}", f"paths.generated={generated}"]
    limits = [f"+trainer.limit_train_batches={BATCHES}", "+trainer.limit_val_batches=1", "predict=true", "test=false"]
    heads = [word for word in ALWAYS if not (word.startswith("callbacks") and links_of(words))]
    main(["train", *words, *heads, *limits, *places, recorder, "+trainer.enable_progress_bar=false"])
    found = {"store": digests_of_store(next(path.parent for path in stores.glob("*/manifest.json")))}
    found |= json.loads(recorded.read_text())
    predictions = run / "predictions.parquet"
    if predictions.is_file():
        found["predictions"] = digests_of_table(predictions)
    return found


def links_of(words: list[str]) -> bool:
    """Whether a run predicts links: its checkpoints follow another metric."""
    return any(word in words[0] for word in ("link", "complex", "distmult", "unsupervised", "rgcn_fb"))


def digests_of_table(path: Path) -> list[str]:
    """Return the digest of each column of a table, in their order."""
    import pyarrow.parquet as pq

    columns = pq.read_table(path).columns
    return [hashlib.sha256(repr(column.to_pylist()).encode()).hexdigest()[:16] for column in columns]


def differences(before: Any, now: Any, at: str = "") -> Iterator[str]:
    """Yield where two trees of digests differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{at}/{key}")
    elif before != now:
        yield at


def write_digests(out: Path, names: list[str]) -> dict[str, Any]:
    """Run what is named, one after the other, write the digests and return them."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            began = time.perf_counter()
            try:
                found[name] = digests_of_run(RUNS[name], Path(scratch) / name, Path(scratch) / "generated")
            except SystemExit as error:
                found[name] = {"refused": str(error)}
            out.write_text(json.dumps(found, indent=1))
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return found


def program() -> int:
    """Run what the words ask for; 1 where something differs or was refused."""
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("out", type=Path)
    words.add_argument("--compare", type=Path)
    words.add_argument("--only", nargs="*", default=list(RUNS))
    given = words.parse_args()
    found = write_digests(given.out, given.only)
    wrong = [f"{name}: refused" for name, digests in found.items() if "refused" in digests]
    if given.compare:
        before = json.loads(given.compare.read_text())
        wrong += [f"{at}: differs" for at in differences({name: before.get(name) for name in found}, found)]
    print("\n".join(wrong or [f"{len(found)} runs, all as before" if given.compare else f"{len(found)} runs"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(program())
