"""Tables of evaluation are made again by every pass:

what is read is what was last written, however the path is reported.
"""

import os
from pathlib import Path

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.layer_source import StoreLayerSource
from lightning_gnnscale.scratch import Scratch
from tests.tiers import first


@first(1)
@pytest.mark.parametrize("told", ["absolute", "relative", "link"])
def test_a_table_of_an_older_pass_is_not_read_again(tmp_path, monkeypatch, store_root, told):
    monkeypatch.chdir(tmp_path)
    if told == "link":
        (tmp_path / "disk").mkdir()
        os.symlink(tmp_path / "disk", tmp_path / "tables")
    parent = tmp_path / "tables" if told != "relative" else Path("tables")
    store = gs.PartitionStore.open(store_root)
    source = StoreLayerSource(store, list(range(store.num_parts)), Scratch(parent, "run-1"))
    nodes = np.arange(store.num_nodes)
    for value in (1.0, 2.0, 3.0):
        table = source.table("layerwise0", 4)
        source.write(table, nodes, np.full((len(nodes), 4), value, np.float32))
        assert (source.gather(nodes, table).numpy() == value).all()
        assert (source.gather(nodes[::7], table).numpy() == value).all()
    source.close()
