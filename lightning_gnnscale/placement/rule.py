"""Algorithm 1: hot rows on every device, the next ones on one device of a group each."""

import numpy as np

from ..jit import kernel


def place_group(order: np.ndarray, prob: np.ndarray, num_devices: int, buffer_rows: int, alpha: float) -> np.ndarray:
    """Place rows on the devices of one group that read each other's buffers.

    Every device begins with the hottest rows. From the coldest of them up, copies give way to further rows, on all
    devices but one, as long as a peer read of the old row costs less than the host reads of the new one that are saved.

    Args:
        order: (num_nodes,) int64 node ids, hottest first.
        prob: (num_nodes,) how likely each is read.
        num_devices: of the group, >= 1.
        buffer_rows: of each device, in [1, num_nodes].
        alpha: cost of a peer read over that of a host read, in [0, 1].

    Returns:
        (num_devices, buffer_rows) int64 node ids.

    Cost: O(num_devices x buffer_rows) time.
    Source: Song and Jiang, ICS 2022, Rule 2 and Algorithm 1, in the form that gives the paper's own example.
    """
    rows = np.repeat(order[None, :buffer_rows], num_devices, axis=0)
    if num_devices > 1:
        _spread(order, prob, float(alpha), rows)
    return rows


def alpha_by_cost(alpha: float, num_devices: int) -> float:
    """Return the alpha with which Algorithm 1 stops where an exchange no longer pays for all devices together.

    A copy of row a that gives way to a row b that is on no device costs its own device alpha p(a), and saves host reads
    of b: p(b) there, and (1 - alpha) p(b) on each of the other devices. That pays while p(b) (n - (n - 1) alpha) >
    alpha p(a). The printed rule asks for p(b) > alpha p(a), and keeps copies that cost the other devices more.

    Args:
        alpha: cost of a peer read over that of a host read, in [0, 1].
        num_devices: n, of the group.
    """
    return alpha / (num_devices - (num_devices - 1) * alpha)


@kernel
def _spread(order, prob, alpha, rows):
    num_devices, buffer_rows = rows.shape
    added = np.zeros(num_devices)
    turn = np.arange(num_devices)
    following = buffer_rows
    for i in range(num_devices * buffer_rows):
        if following >= len(order):
            return
        place = i % num_devices
        if place == 0:
            # The device to which least was added goes first; equal ones by number.
            for k in range(num_devices):
                turn[k] = k
            for k in range(1, num_devices):
                device, j = turn[k], k
                while j > 0 and added[turn[j - 1]] > added[device]:
                    turn[j] = turn[j - 1]
                    j -= 1
                turn[j] = device
        if place == num_devices - 1:
            continue  # the last one keeps its copy
        position = buffer_rows - 1 - i // num_devices
        device, new = turn[place], order[following]
        if not prob[new] > alpha * prob[rows[device, position]]:
            return
        rows[device, position] = new
        added[device] += prob[new]
        following += 1
