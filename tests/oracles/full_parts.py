"""Parts without a node get one: the plain way, a part at a time."""


def filled(part_id, num_parts):
    """Each empty part, in order, takes a node of the largest part, the lowest; whose nodes go in ascending order."""
    sizes = [0] * num_parts
    for part in part_id:
        sizes[part] += 1
    empty = [part for part in range(num_parts) if sizes[part] == 0]
    gives = [0] * num_parts
    for _ in empty:
        largest = max(range(num_parts), key=lambda part: sizes[part])
        sizes[largest] -= 1
        gives[largest] += 1
    leave = []
    for part in range(num_parts):
        nodes = [node for node, of in enumerate(part_id) if of == part]
        leave += nodes[len(nodes) - gives[part] :]
    moved = dict(zip(leave, empty, strict=True))
    return [moved.get(node, int(part)) for node, part in enumerate(part_id)]
