"""The stream in the order of time: its states after each addition, and the blocks that they run through."""

from collections.abc import Mapping, Sequence

from mainstem.model.anatomy import Anatomy, Block, Read
from mainstem.model.graph import StreamGraph, SumNode, WriteNode, children
from mainstem.model.hooks import Site
from mainstem.model.labels import Labelled
from mainstem.units import Unit


def latest_writes(graph: StreamGraph) -> list[int]:
    """For each node the latest write that is in it; -1 for a constant."""
    latest: list[int] = []
    for i, node in enumerate(graph.nodes):
        own = node.write if isinstance(node, WriteNode) else -1
        latest.append(max([own, *(latest[child] for child in children(graph, i))]))
    return latest


def spine_of(graph: StreamGraph, latest: list[int]) -> tuple[int, ...]:
    """The stream's states from the embedding to the root: each node that holds the first write, latest branch first."""
    first = [False] * len(graph.nodes)
    for i, node in enumerate(graph.nodes):
        own = isinstance(node, WriteNode) and node.write == 0
        first[i] = own or any(first[child] for child in children(graph, i))
    spine, node = [graph.root], graph.root
    while True:
        inside = [child for child in children(graph, node) if first[child]]
        if not inside:
            return tuple(reversed(spine))
        node = max(inside, key=lambda child: latest[child])
        spine.append(node)


def blocks_of(
    spine: tuple[int, ...],
    graph: StreamGraph,
    latest: list[int],
    labelled: Labelled,
    reads: Sequence[Read],
    sites: Mapping[int, Site],
) -> tuple[Block, ...]:
    """The blocks in the order of execution, each with the state of the stream that enters it."""
    blocks = []
    for layer, (path, call, writes) in enumerate(labelled.blocks):
        before = [node for node in spine if latest[node] < min(writes)] or [spine[0]]
        read = {read.stream_node for read in reads if read.unit.layer == layer}
        entry = _entry([node for node in before if latest[node] == latest[before[-1]]], read, graph)
        blocks.append(Block(layer, path, call, tuple(writes), entry, sites[entry]))
    return tuple(blocks)


def _entry(states: list[int], read: set[int], graph: StreamGraph) -> int:
    """Of the states between two additions the last that all reads of the block see.

    A later one, such as the stream times a factor of the skip connection, is seen by the next addition alone.
    """
    for state in reversed(states):
        if all(_behind(graph, node, state) for node in read):
            return state
    return states[-1]


def _behind(graph: StreamGraph, node: int, state: int) -> bool:
    """Whether `node` is made from `state`, or is it."""
    pending, seen = [node], set[int]()
    while pending:
        current = pending.pop()
        if current == state:
            return True
        if current > state and current not in seen:
            seen.add(current)
            pending.extend(children(graph, current))
    return False


def spine_states(anatomy: Anatomy) -> tuple[list[int], list[Unit]]:
    """The embedding and the state after each addition: nodes of the graph, and what was added last."""
    graph, spine = anatomy.graph, anatomy.spine
    nodes: list[int] = []
    units: list[Unit] = []
    for place, node in enumerate(spine):
        owner = anatomy.owners[node]
        made = graph.nodes[node]
        adds = isinstance(made, SumNode) and len(made.terms) > 1
        last = place == len(spine) - 1 or anatomy.owners[spine[place + 1]] != owner
        if owner is not None and (place == 0 or adds or last):
            if units and units[-1] == owner:
                nodes[-1] = node
            else:
                nodes.append(node)
                units.append(owner)
    return nodes, units
