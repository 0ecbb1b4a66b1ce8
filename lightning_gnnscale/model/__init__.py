"""Models over CSC mini-batches, their Lightning module, and exact layer-wise inference."""

from .backbone import Backbone, NoLayers
from .decoders import ComplEx, DistMult, DotDecoder, LinkDecoder, MLPDecoder, RelationDecoder, TransE
from .edge_classifier import EdgeClassifier
from .gat import GAT
from .gcn import GCN, SGC
from .gine import GINE
from .graphsage import NGNN, GraphSAGE
from .hetero import Hetero
from .hgt import HGT
from .inference import LayerwiseOutput, layerwise_inference
from .layer_source import EvaluationShare, LayerSource, RowBlock
from .link_predictor import HitsAt, LinkPredictor, MeanReciprocalRank, link_ranks
from .node_classifier import NodeClassifier, NodeRegressor
from .node_inputs import NodeInputs, TakesInputs
from .relational import RelationalBackbone
from .rgat import RGAT
from .rgcn import RGCN
from .row_layers import RowEdges, RowLayer, prepared_rows

__all__ = [
    "GAT",
    "GCN",
    "GINE",
    "HGT",
    "NGNN",
    "RGAT",
    "RGCN",
    "SGC",
    "Backbone",
    "ComplEx",
    "DistMult",
    "DotDecoder",
    "EdgeClassifier",
    "EvaluationShare",
    "GraphSAGE",
    "Hetero",
    "HitsAt",
    "LayerSource",
    "LayerwiseOutput",
    "LinkDecoder",
    "LinkPredictor",
    "MLPDecoder",
    "MeanReciprocalRank",
    "NoLayers",
    "NodeClassifier",
    "NodeInputs",
    "NodeRegressor",
    "RelationDecoder",
    "RelationalBackbone",
    "RowBlock",
    "RowEdges",
    "RowLayer",
    "TakesInputs",
    "TransE",
    "layerwise_inference",
    "link_ranks",
    "prepared_rows",
]
