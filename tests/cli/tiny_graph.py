"""A ring of 40 nodes in files, and the words that train on it in no time."""

import numpy as np

TINY = [
    "dataset=files",
    "dataset.edges=edges.npy",
    "dataset.features=x.npy",
    "dataset.labels=y.npy",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.enable_progress_bar=false",
    "partitioner=random",
    "sampler.fanouts=[2,2]",
    "model.backbone.hidden_channels=4",
    "num_parts=2",
]


def write_tiny_graph() -> None:
    """Write the files that `TINY` names into the working folder."""
    nodes = np.arange(40)
    np.save("edges.npy", np.stack([nodes, (nodes + 1) % 40]))
    np.save("x.npy", np.eye(40, 6, dtype=np.float32))
    np.save("y.npy", nodes % 2)
