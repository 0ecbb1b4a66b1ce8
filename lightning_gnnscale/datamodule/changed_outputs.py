"""Which outputs a new version of a store can have altered, and the earlier predictions of all other nodes."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from ..across_ranks import of_first_rank, rank
from ..errors import GNNScaleError
from ..model.backbone_module import BackboneModule
from ..model.layer_source import NodeSet, with_sources
from ..partition_store.versions import StoreChanges
from ..traits import BackboneTraits
from .layer_source import EvaluationLoader, EvaluationPass, StoreLayerSource

METADATA = b"gnnscale"  # key of a file's metadata: of which store and which model its predictions are
MOST = 0.5  # share of the nodes above which all are computed
_ROWS_AT_ONCE = 1 << 18
_log = logging.getLogger("lightning.pytorch.predictions")


class KeptOutputs(NamedTuple):
    """The nodes that are computed again, and the file that has the others' predictions."""

    path: Path
    altered: NodeSet


def identity_of(trainer: Any, module: Any) -> dict[str, str] | None:
    """Return which store and which model predictions are of; None of a module that is not of this package.

    A model is the same where its weights are, its backbone and settings, and the precision that it computes in.
    """
    if not isinstance(module, BackboneModule):
        return None
    loader = trainer.predict_dataloaders
    settings = [type(module).__name__, module.described_backbone(), dict(module.hparams), str(trainer.precision)]
    settings.append(loader.evaluation.table_dtype if isinstance(loader, EvaluationLoader) else None)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, values in sorted(module.state_dict().items()):
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.reshape(-1).view(torch.uint8).numpy())
    return {"store": trainer.datamodule.store.manifest_digest, "model": digest.hexdigest()}


def kept_outputs(trainer: Any, module: Any, paths: Sequence[Path], own: dict[str, str] | None) -> KeptOutputs | None:
    """Choose what is computed again: the nodes that the last update can have altered, or None, all; a line says why.

    Every rank calls it. The trainer's one exact pass then has these nodes alone.

    Args:
        trainer, module: As `on_predict_start` has them.
        paths: Files that may have the predictions of the version before, on rank 0's machine.
        own: What `identity_of` says of this run.
    """
    store = trainer.datamodule.store
    path, why = of_first_rank(lambda: _earlier(trainer.predict_dataloaders, module, store, paths, own))
    altered = None
    if path is not None:
        evaluation = trainer.predict_dataloaders.evaluation
        backbone, changes = module.backbone, store.changes()
        altered = altered_nodes(evaluation.source, changes, backbone.num_layers, backbone.needs_degree)
        why = f"{len(altered):,} of {store.num_nodes:,}"
        if len(altered) > MOST * store.num_nodes:
            why, altered = f"the change reaches more than half of them in {backbone.num_layers} layers", None
    if rank() == 0 and altered is None:
        _log.info("Predictions: all %s nodes are computed: %s", f"{store.num_nodes:,}", why)
    if altered is None:
        return None
    if rank() == 0:
        _log.info(
            "Predictions: %s nodes are computed again, what %s reach in %d layers; the others are those of %s",
            why, _said(changes), backbone.num_layers, path,
        )  # fmt: skip
    evaluation.sample = altered
    return KeptOutputs(Path(path), altered)


def altered_nodes(source: StoreLayerSource, changes: StoreChanges, num_layers: int, by_degree: bool) -> NodeSet:
    """Return the nodes whose outputs an update can have altered; every rank calls it.

    Altered inputs are those of new nodes and of changed features. A layer alters the nodes that read an altered one,
    and those with other in-edges; where messages are scaled by the degree of their source, as in GCN, also the nodes
    that read one with other in-edges.

    Args:
        source: The graph; each rank looks at its own rows.
        changes: As `PartitionStore.changes` has them.
        num_layers: Layers of the model.
        by_degree: Whether the model reads degrees of sources.

    Returns:
        The set, as far as it was followed: up to `MOST` of the nodes.

    Cost: a read of all edges a layer; in a store with all reverses, of the rows of altered nodes alone.
    """
    store = source.store
    inputs = store.store_nid[np.concatenate([changes.new, changes.features])]
    rows = NodeSet.of(store.store_nid[changes.in_edges], store.num_nodes)
    current = NodeSet.of(inputs, store.num_nodes)
    if by_degree:
        current = NodeSet(current.bits | rows.bits)
    for _ in range(num_layers):
        reached = with_sources(source, current) if store.symmetric else _with_targets(source, current)
        bits = reached.bits | rows.bits
        source.union(bits)
        current = NodeSet(bits)
        if len(current) > MOST * store.num_nodes:
            break
    return current


def kept_rows(store: Any, kept: KeptOutputs) -> Iterator[dict[str, Any]]:
    """Yield the earlier predictions of the nodes that are not computed again, as `predict_step` returns rows.

    Raises:
        GNNScaleError: the file lacks one of them.

    Cost: the file in memory, and a table of its ids.
    """
    nodes = np.setdiff1d(np.arange(store.num_nodes), kept.altered.within(0, store.num_nodes), assume_unique=True)
    earlier = pq.read_table(kept.path, columns=["node", "prediction"], page_checksum_verification=True).combine_chunks()
    ids = earlier["node"].combine_chunks()
    places = pc.index_in(pa.array(store.user_ids(nodes), ids.type), value_set=ids)
    if places.null_count:
        missing = store.user_ids(nodes[[int(np.argmax(places.is_null().to_numpy(zero_copy_only=False)))]])[0]
        raise GNNScaleError(f"{kept.path}: has no prediction of node {missing}: say changed=false, or predict it again")
    for start in range(0, len(nodes), _ROWS_AT_ONCE):
        values = earlier["prediction"].take(places[start : start + _ROWS_AT_ONCE]).combine_chunks()
        chosen = nodes[start : start + _ROWS_AT_ONCE]
        is_list = pa.types.is_list(values.type)
        rows = values.flatten().to_numpy().reshape(len(chosen), -1) if is_list else values.to_numpy()
        yield {"nodes": chosen, "prediction": rows}


def _earlier(
    loader: Any, module: Any, store: Any, paths: Sequence[Path], own: dict[str, str] | None
) -> tuple[str | None, str]:
    """Return the file of the version before, or None, and why there is none."""
    if store.version is None:
        return None, f"{store.root} is no update of another store"
    if store.schema is not None and store.schema.num_node_types > 1:
        return None, "the graph has several node types, each with ids of its own"
    if own is None or BackboneTraits(module.backbone).layer is None or not isinstance(loader, EvaluationLoader):
        return None, "they are not computed layer by layer"
    evaluation: EvaluationPass = loader.evaluation
    if evaluation.split is not None or evaluation.links is not None:
        return None, "edges are predicted"
    if module.inputs is not None:
        return None, "the model has learned rows, and nothing says which of them differ"
    why, wanted = "there are none of the version before", own | {"store": store.version["parent"]["manifest"]}
    for path in (path for path in paths if path.is_file()):
        told = json.loads((pq.read_schema(path).metadata or {}).get(METADATA, b"{}"))
        if told == wanted:
            return str(path), ""
        of = "another version" if told.get("store") != wanted["store"] else "another model or precision"
        why = f"those of {path} are of {of}"
    return None, why


def _with_targets(source: StoreLayerSource, nodes: NodeSet) -> NodeSet:
    """Return a set of nodes and of those of this rank's rows that read one of them."""
    found = [np.empty(0, np.int64)]
    for block in source.blocks():
        hits = np.concatenate([np.zeros(1, np.int64), np.cumsum(nodes.contains(np.asarray(block.indices)))])
        found.append(block.rows[hits[block.indptr[1:]] > hits[block.indptr[:-1]]])
    return NodeSet(nodes.bits | NodeSet.of(np.concatenate(found), source.num_nodes).bits)


def _said(changes: StoreChanges) -> str:
    named = (("new", "new"), ("features", "with changed features"), ("in_edges", "with other in-edges"))
    return ", ".join(f"{len(getattr(changes, name)):,} {said}" for name, said in named)
