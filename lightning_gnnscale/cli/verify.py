"""`gnnscale verify STORE`: every byte of a partition store, compared with what was written."""

import sys
import time

from omegaconf import DictConfig

from ..errors import PartitionStoreError
from ..partition_store import PartitionStore


def run(config: DictConfig) -> None:
    """Print what was checked; exit with 1, and one line on stderr, where the store is not as it was written."""
    began = time.perf_counter()
    try:
        store = PartitionStore.open(config.store)
        store.verify()
    except PartitionStoreError as error:
        print(f"gnnscale: {error}", file=sys.stderr)
        sys.exit(1)
    files = store.manifest["files"].values()
    num_bytes, seconds = sum(entry["bytes"] for entry in files), time.perf_counter() - began
    print(f"{store.root}: {len(files)} files, {num_bytes:,} bytes, all as written ({seconds:.1f} s)")
