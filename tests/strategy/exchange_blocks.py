"""Blocks of rows for tests, from the edges or from what each process reads."""

from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

# Three processes own 0 to 3, 4 to 6, 7 to 9. Nobody reads 2 and 6; 3 is read by both others.
OFFSETS = (0, 4, 7, 10)
READ = ((4, 5, 9), (0, 3, 8), (3,))


def make_blocks(offsets=OFFSETS, read=READ, symmetric=True):
    """Return the block of each process: who reads which rows, written down from both sides.

    Args:
        offsets: process r owns [offsets[r], offsets[r + 1]).
        read: for each process, ascending rows of others that it reads.
    """
    world_size = len(read)

    def sent(owner, reader):
        own = [row - offsets[owner] for row in read[reader] if offsets[owner] <= row < offsets[owner + 1]]
        return np.array(own if owner != reader else [], np.int64)

    return [
        SimpleNamespace(
            rank=rank,
            world_size=world_size,
            offsets=np.array(offsets, np.int64),
            halo_nodes=np.array(read[rank], np.int64),
            send_rows=tuple(sent(rank, reader) for reader in range(world_size)),
            symmetric=symmetric,
            num_local=offsets[rank + 1] - offsets[rank],
            num_halo=len(read[rank]),
        )
        for rank in range(world_size)
    ]


@st.composite
def blocks(draw):
    """Blocks of one to four processes, some of them without rows, some without a halo."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    offsets = [0, *np.cumsum(sizes).tolist()]

    def foreign(rank):
        rows = [row for row in range(offsets[-1]) if not offsets[rank] <= row < offsets[rank + 1]]
        return sorted(draw(st.sets(st.sampled_from(rows)))) if rows else []

    return make_blocks(offsets, [foreign(rank) for rank in range(len(sizes))])
