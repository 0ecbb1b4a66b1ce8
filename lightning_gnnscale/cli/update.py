"""`gnnscale update`: write the next version of a partition store, with what came, changed or went since."""

import time
import warnings
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ..partition_store import update_store
from ..partition_store.versions import said_counts
from ..report.terminal import ProgressBars
from .errors import show_warning


def run(config: DictConfig) -> None:
    """Update, and print what changed and what became of the parts."""
    warnings.showwarning = show_warning
    began = time.perf_counter()
    given = OmegaConf.to_container(config.change, resolve=True)
    named = {name: value for name, value in given.items() if name != "_target_"}
    with ProgressBars() as progress:
        dataset = None if config.dataset is None else instantiate(config.dataset)
        store = update_store(
            Path(str(config.store)).expanduser(),
            dataset,
            config.output,
            slack=config.slack,
            drift=config.drift,
            progress=progress,
            overwrite=config.overwrite,
            **named,
        )
    version = store.version
    cut, balance = version["cut"], version["balance"]
    seconds, said = time.perf_counter() - began, said_counts(version["counts"])
    print(f"{store.root}: version {version['number']} ({seconds:.1f} s): {said}")
    print(
        f"{store.num_nodes:,} nodes, {store.num_edges:,} edges; edges between parts {cut['before']:.2%} before, "
        f"{cut['after']:.2%} now; largest part {balance['before']:.3f} of the mean before, {balance['after']:.3f} now"
    )
