"""Counters of the rule of Misra and Gries: what a node's neighbours hold most, in a few slots a node."""

from ...jit import kernel

SLOTS = 8


@kernel(inline="always")
def count(values, counts, value):
    """Count a value in slots; the first belongs to one value for good, and is exact.

    A value without a slot takes one whose count is zero; where there is none, all but the first count one less. The
    others are thus too low by at most a SLOTS-th of all that they counted, and exact up to SLOTS values.

    Args:
        values, counts: (SLOTS,); changed in place. Slots without a value hold one that never comes.
        value: what to count.

    Source: Misra and Gries, Science of Computer Programming 2(2), 1982.
    """
    free, found = -1, False
    for k in range(SLOTS):
        if values[k] == value:
            counts[k] += 1
            found = True
            break
        if k > 0 and counts[k] == 0:
            free = k
    if not found:
        if free > 0:
            values[free], counts[free] = value, 1
        else:
            for k in range(1, SLOTS):
                counts[k] -= 1
