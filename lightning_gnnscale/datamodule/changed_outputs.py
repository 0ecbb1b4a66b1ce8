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
from .kept_layers import earlier_layers, layers_folder
from .layer_source import EvaluationLoader, EvaluationPass, StoreLayerSource

METADATA = b"gnnscale"  # key of a file's metadata: of which store and which model its predictions are
MOST = 0.5  # share of the outputs, with kept layers of the rows of all layers, above which all are computed
_ROWS_AT_ONCE = 1 << 18
_log = logging.getLogger("lightning.pytorch.predictions")


class KeptOutputs(NamedTuple):
    """The nodes that are computed again, and what has the others' rows.

    Attributes:
        path: The file that has the others' predictions.
        altered: The nodes.
        layers: Tables of the hidden layers of the version before, see `KeptLayers`; None: there are none.
    """

    path: Path
    altered: NodeSet
    layers: list[np.ndarray] | None


def exact_pass_of(trainer: Any, module: Any) -> EvaluationPass | None:
    """Return the one pass in which all nodes are predicted layer by layer; None: they are not."""
    loader = trainer.predict_dataloaders
    is_exact = isinstance(loader, EvaluationLoader) and isinstance(module, BackboneModule)
    return loader.evaluation if is_exact and BackboneTraits(module.backbone).layer is not None else None


def identity_of(trainer: Any, module: Any, left_out: np.ndarray | None = None) -> dict[str, str] | None:
    """Return which store and which model predictions are of; None of a module that is not of this package.

    A model is the same where its weights are, its backbone and settings, and the precision that it computes in.

    Args:
        left_out: Numbers of the node types without predictions; None: all have some.
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
    store = trainer.datamodule.store
    found = {"store": store.manifest_digest, "model": digest.hexdigest()}
    if left_out is not None:
        found["left_out"] = ",".join(store.schema.node_types[number] for number in left_out)
    return found


def kept_outputs(
    trainer: Any,
    module: Any,
    paths: Sequence[Path],
    own: dict[str, str] | None,
    left_out: np.ndarray | None = None,
    keep_layers: bool = False,
) -> KeptOutputs | None:
    """Choose what is computed again: the nodes that the last update can have altered, or None, all; a line says why.

    Every rank calls it. The trainer's one exact pass then has these nodes alone.

    Args:
        trainer, module: As `on_predict_start` has them.
        paths: Files that may have the predictions of the version before, on rank 0's machine.
        own: What `identity_of` says of this run.
        left_out: Numbers of the node types that have no predictions; None: all have some.
        keep_layers: Whether hidden layers are kept: then all nodes are computed unless those of before are there.
    """
    store, evaluation, found = trainer.datamodule.store, exact_pass_of(trainer, module), None
    path, why = of_first_rank(lambda: _earlier(evaluation, module, store, paths, own))
    if path is not None:
        backbone, changes = module.backbone, store.changes()
        wanted = {"store": store.version["parent"]["manifest"], "model": own["model"]}
        layers, why = earlier_layers(layers_folder(Path(path)), wanted, backbone)
        if layers is None and keep_layers:
            why = f"hidden layers of all are to be kept, and {why}"
        else:
            altered = altered_nodes(evaluation.source, changes, backbone.num_layers, backbone.needs_degree, layers)
            why = f"the change reaches more than half of them in {backbone.num_layers} layers"
            if altered is not None:
                found = KeptOutputs(Path(path), _with_rows(store, altered[-1], left_out), layers)
    if found is None:
        if rank() == 0:
            _log.info("Predictions: all %s nodes are computed: %s", f"{store.num_nodes:,}", why)
        return None
    evaluation.sample = found.altered
    if layers is not None:
        computed = [*altered[1:-1], found.altered]
        inputs = with_sources(evaluation.source, computed[0])
        evaluation.source.union(inputs.bits)
        evaluation.computed = [NodeSet(inputs.bits), *computed]
    if rank() == 0:
        hidden = "" if layers is None else f", and hidden layers those of {layers_folder(found.path)}"
        _log.info(
            "Predictions: %s of %s nodes are computed again, what %s reach in %d layers; the others are those of %s%s",
            f"{len(found.altered):,}", f"{store.num_nodes:,}", _said(changes), backbone.num_layers, path, hidden,
        )  # fmt: skip
    return found


def altered_nodes(
    source: StoreLayerSource, changes: StoreChanges, num_layers: int, by_degree: bool, layers: Any = None
) -> list[NodeSet] | None:
    """Return the nodes whose rows an update can have altered, layer by layer; every rank calls it.

    Altered inputs are those of new nodes and of changed features. A layer alters the nodes that read an altered one,
    and those with other in-edges; where messages are scaled by the degree of their source, as in GCN, also the nodes
    that read one with other in-edges.

    Args:
        source: The graph; each rank looks at its own rows.
        changes: As `PartitionStore.changes` has them.
        num_layers: Layers of the model.
        by_degree: Whether the model reads degrees of sources.
        layers: Kept layers of the version before, from which each layer computes its own set; None: there are none.

    Returns:
        num_layers + 1 sets, each within the next: altered inputs, and what each layer makes of them. None where the
        last has more than `MOST` of the nodes, with `layers` where all layers together have more than that of theirs.

    Cost: a read of all edges a layer; in a store with all reverses, of the rows of altered nodes alone.
    """
    store = source.store
    inputs = store.store_nid[np.concatenate([changes.new, changes.features])]
    rows = NodeSet.of(store.store_nid[changes.in_edges], store.num_nodes)
    current = NodeSet.of(inputs, store.num_nodes)
    if by_degree:
        current = NodeSet(current.bits | rows.bits)
    found, num_rows, most = [current], 0, MOST * store.num_nodes * (1 if layers is None else num_layers)
    for _ in range(num_layers):
        reached = with_sources(source, current) if store.symmetric else _with_targets(source, current)
        bits = reached.bits | rows.bits
        source.union(bits)
        current = NodeSet(bits)
        found.append(current)
        num_rows = len(current) + (0 if layers is None else num_rows)
        if num_rows > most:
            return None
    return found


def kept_rows(store: Any, kept: KeptOutputs, left_out: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
    """Yield the earlier predictions of the nodes that are not computed again, as `predict_step` returns rows.

    Args:
        left_out: Numbers of the node types that have no predictions; None: all have some.

    Raises:
        GNNScaleError: the file lacks one of them.

    Cost: the file in memory, and a table of its ids.
    """
    nodes = np.setdiff1d(np.arange(store.num_nodes), kept.altered.within(0, store.num_nodes), assume_unique=True)
    if store.schema is None or store.schema.num_node_types == 1:
        yield from _joined(store, nodes, kept.path, None)
        return
    types = store.node_type(nodes)
    for number in np.setdiff1d(np.unique(types), [] if left_out is None else left_out):
        yield from _joined(store, nodes[types == number], kept.path, store.schema.node_types[number])


def _joined(store: Any, nodes: np.ndarray, path: Path, node_type: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of predictions for some nodes, all of one node type; None: there is but one."""
    chosen = None if node_type is None else [("node_type", "==", node_type)]
    read = {"columns": ["node", "prediction"], "filters": chosen, "page_checksum_verification": True}
    earlier = pq.read_table(path, **read).combine_chunks()
    ids = earlier["node"].combine_chunks()
    places = pc.index_in(pa.array(store.user_ids(nodes), ids.type), value_set=ids)
    if places.null_count:
        missing = store.user_ids(nodes[[int(np.argmax(places.is_null().to_numpy(zero_copy_only=False)))]])[0]
        raise GNNScaleError(f"{path}: has no prediction of node {missing}: say changed=false, or predict it again")
    for start in range(0, len(nodes), _ROWS_AT_ONCE):
        values = earlier["prediction"].take(places[start : start + _ROWS_AT_ONCE]).combine_chunks()
        chosen = nodes[start : start + _ROWS_AT_ONCE]
        is_list = pa.types.is_list(values.type)
        rows = values.flatten().to_numpy().reshape(len(chosen), -1) if is_list else values.to_numpy()
        yield {"nodes": chosen, "prediction": rows}


def _earlier(
    evaluation: EvaluationPass | None, module: Any, store: Any, paths: Sequence[Path], own: dict[str, str] | None
) -> tuple[str | None, str]:
    """Return the file of the version before, or None, and why there is none."""
    if store.version is None:
        return None, f"{store.root} is no update of another store"
    if own is None or evaluation is None:
        return None, "they are not computed layer by layer"
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
        of = "other node types" if told.get("left_out") != wanted.get("left_out") else of
        why = f"those of {path} are of {of}"
    return None, why


def _with_rows(store: Any, nodes: NodeSet, left_out: np.ndarray | None) -> NodeSet:
    """Return those of some nodes whose node type has predictions."""
    if left_out is None:
        return nodes
    chosen = nodes.within(0, store.num_nodes)
    return NodeSet.of(chosen[~np.isin(store.node_type(chosen), left_out)], store.num_nodes)


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
