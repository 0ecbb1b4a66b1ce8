"""Placements and feature tables of every kind, and what gathering through them should count."""

from dataclasses import replace

import numpy as np

from lightning_gnnscale.partition_store.features import DenseFeatures
from lightning_gnnscale.placement import DISK, HOST, place
from lightning_gnnscale.triton_kernels.gather_rows import RowCode
from tests.oracles.gather_rows import decode_codes_reference, encode_codes_reference

DTYPES = ["f4", "f2", "i1", "u2", "f8", "?", "i8"]
GROUPS = {1: [[[0]]], 2: [[[0, 1]], [[0], [1]]], 4: [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]]}


def table(num_rows, dim, dtype, seed=0):
    """Features of random bits."""
    size = np.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 256, num_rows * dim * size, np.uint8)
    return DenseFeatures(bits.view(dtype).reshape(num_rows, dim))


def placed(num_nodes, num_devices, groups, share=0.2, on_disk=0.0, seed=0, fingerprint=""):
    prob = np.random.default_rng(seed).random(num_nodes)
    host_rows = None if on_disk == 0 else int(num_nodes * (1 - share) * (1 - on_disk))
    rows = max(1, int(num_nodes * share))
    placement = place(prob, num_devices, rows, 0.1, groups, host_rows=host_rows)
    return replace(placement, fingerprint=fingerprint)


def counted(placement, device, nodes):
    """How many of the nodes each tier holds, from dev_num."""
    dev_num = placement.dev_num[device][nodes]
    tiers = {"local": dev_num == device, "host": dev_num == HOST, "disk": dev_num == DISK}
    tiers["peer"] = (dev_num >= 0) & (dev_num != device)
    return {name: int(mask.sum()) for name, mask in tiers.items()}


def quantised_table(num_rows, dim, bits, seed=0):
    """Features as codes, and the rows that they decode to."""
    code, random = RowCode(dim, bits), np.random.default_rng(seed)
    raw = encode_codes_reference(random.standard_normal((num_rows, dim)).astype(np.float32), code)
    return DenseFeatures(raw, code), decode_codes_reference(raw, code)
