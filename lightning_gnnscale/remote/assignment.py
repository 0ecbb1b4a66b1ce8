"""Which worker prepares which part: a random deal for each epoch that every trainer node works out by itself."""

from collections.abc import Collection, Sequence

from ..rng import fold, permutation

_DEAL, _ORPHANS = 0x6465616C, 0x6F727068  # two draws of one epoch


def assign_parts(
    parts: Sequence[int], num_workers: int, alive: Collection[int], seed: int, epoch: int
) -> dict[int, int]:
    """Deal parts to workers at random. Each part goes to one worker; the workers' counts differ by one at most.

    Args:
        parts: Distinct part ids.
        num_workers: Number of workers that the parts are dealt to, >= 1.
        alive: Numbers of the workers that can take a part, in [0, num_workers). The parts of the others are dealt to
            these; no other part moves.
        seed, epoch: Seed and epoch that the random deal is drawn from.

    Returns:
        Part id to worker number. It depends on the arguments alone, not on the order of the parts.

    Raises:
        ValueError: no worker is alive.

    Source: Armada's coordinator. Differs: it is a function, not a process, so that nothing has to be asked.
    """
    able = sorted(set(alive))
    if not able or not 0 <= able[0] <= able[-1] < num_workers:
        raise ValueError(f"alive must be workers in [0, {num_workers}), at least one, got {able}")
    dealt = _shuffled(parts, fold(seed, epoch, _DEAL))
    first = fold(seed, epoch, num_workers) % num_workers  # who gets one more is drawn too
    owner = {part: (first + number) % num_workers for number, part in enumerate(dealt)}
    orphans = [part for part in dealt if owner[part] not in able]
    for number, part in enumerate(_shuffled(orphans, fold(seed, epoch, _ORPHANS))):
        owner[part] = able[number % len(able)]
    return owner


def _shuffled(parts: Sequence[int], key: int) -> list[int]:
    ordered = sorted(parts)
    return [ordered[place] for place in permutation(len(ordered), key)]
