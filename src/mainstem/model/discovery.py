"""Discovery: one recorded forward pass of a model becomes its anatomy.

The order of work: record; find the readout and the stream (`stream`); expand it into a graph of writes; see what lies
behind each write (`paths`, `attention`, `labels`); find what reads the stream (`reads`). Nothing depends on the name
of a class or a configuration key; what cannot be seen in the operations is refused with the place named.

Cost: one forward pass of about a dozen tokens with every intermediate kept, and small probes of single operations.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import NoLanguageHeadError, NotFiniteError, RefusedError
from mainstem.model.anatomy import Anatomy, Sizes, Write, merged
from mainstem.model.graph import Gate, Node, NormNode, StreamGraph, SumNode, Term, WriteNode
from mainstem.model.labels import Labelled, label_writes
from mainstem.model.outputs import logits_of
from mainstem.model.readout import find_readout
from mainstem.model.reads import find_reads
from mainstem.model.recorder import record
from mainstem.model.recording import Recording, Value
from mainstem.model.sites import SiteFinder
from mainstem.model.spine import blocks_of, latest_writes, spine_of
from mainstem.model.stream import StreamWalk, find_head, find_root

PRIMES = (11, 13, 17, 19, 23, 29, 31, 37)
SHORT_PROBE = 7
"""How long the prompt of a certificate is: a source and a destination of their own, at little cost."""


@torch.inference_mode(False)  # of a caller: there nothing tells what is changed in place
@torch.no_grad()
def discover(model: torch.nn.Module, **forward: Any) -> Anatomy:
    """The anatomy of a causal language model.

    Args:
        model: the module, in evaluation mode; it is run a few times on random tokens and left as it was.
        forward: keyword arguments for its forward call, besides the token ids.

    Raises:
        NoLanguageHeadError: if the run returns no logits.
        RefusedError, ParallelStreamsError: if the stream cannot be discovered; the message names the place.
        NotFiniteError: if the stream of that run is not finite; names the first module.
    """
    with _without_collection():
        return _discover(model, probe_ids(model), forward)


def _discover(model: torch.nn.Module, ids: Tensor, forward: dict[str, Any]) -> Anatomy:
    other_end = _run_with_another_end(model, ids, forward)  # first: some models rebuild modules when first run
    recording = record(model, ids, **forward)
    try:
        return _read_off(model, recording, ids.shape[1], other_end)
    finally:
        recording.release()


def require_finite(values: Sequence[Value]) -> None:
    """Refuses a recorded stream with NaN in it, which is unlike itself, so that no comparison would say anything.

    Raises:
        NotFiniteError: names the first place.
    """
    for value in sorted(values, key=lambda value: value.id):
        if value.tensor.is_floating_point() and not bool(torch.isfinite(value.tensor).all()):
            frame = value.call.frame if value.call is not None else None
            place = frame.path if frame is not None and frame.path else "the model"
            raise NotFiniteError("A run on random tokens gives NaN or infinity in the stream", place)


def _read_off(model: torch.nn.Module, recording: Recording, positions: int, other_end: Tensor) -> Anatomy:
    """The anatomy that a recording shows."""
    logits = recording.result["logits"]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise NoLanguageHeadError("The model returns no logits over a vocabulary", type(model).__name__)
    end, product, head_input = find_head(recording, logits)
    walk, root = find_root(recording, head_input, positions)
    finder = SiteFinder(recording, positions)
    values = expand(walk, root)
    require_finite(values)
    leaves = [value for value in values if not walk.step(value).terms]
    labelled = label_writes(leaves, values, recording, finder, walk)
    reads = find_reads(recording, walk, values, labelled, finder)
    writes = [replace(write, activation=reads.activations.get(i)) for i, write in enumerate(labelled.writes)]
    graph_values = _with_reads(walk, values, reads.inputs)
    graph, node_of = _graph(walk, graph_values, leaves, root, finder)
    latest = latest_writes(graph)
    units = [write.unit for write in labelled.writes]
    owners = tuple(units[i] if i >= 0 else None for i in latest)
    spine = spine_of(graph, latest)
    tensors = {node: value for value, node in ((v, node_of[v.id]) for v in graph_values)}
    spine_sites = tuple(finder.site(tensors[n], whole=True) for n in spine)
    made = reads.finish(node_of)
    blocks = blocks_of(spine, graph, latest, labelled, made, dict(zip(spine, spine_sites, strict=True)))
    readout = find_readout(root, head_input, product, end, finder, positions)
    return Anatomy(
        writes=tuple(writes),
        reads=tuple(made),
        blocks=blocks,
        graph=graph,
        write_nodes=tuple(node_of[leaf.id] for leaf in leaves),
        spine=spine,
        spine_sites=spine_sites,
        owners=owners,
        readout=readout,
        sizes=_sizes(labelled.writes, len(blocks), walk.width, logits.shape[-1], labelled, reads.query_width),
        tied=_tied(recording, readout.unembedding),
        causal=_agree_before_the_end(logits, other_end),
        positions=_position_scheme(labelled.writes),
        dtype=root.tensor.dtype,
        notes=tuple(labelled.notes),
        expert_reads=tuple(reads.finish_experts(node_of)),
    )


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python's cycle collector would walk the whole recording again and again, a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def probe_ids(model: torch.nn.Module) -> Tensor:
    """Random token ids [1, positions]; the number of positions divides no size of the model."""
    table = _embedding_table(model)
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    count = next((p for p in PRIMES if all(size % p for size in sizes if size < 200_000 and size >= p)), PRIMES[1])
    generator = torch.Generator().manual_seed(0)
    high = table.shape[0]
    low = min(5, high // 4)
    ids = torch.randperm(min(high - low, 50_000), generator=generator)[:count] + low
    return ids[None].to(table.device)


def short_probe_ids(model: torch.nn.Module) -> Tensor:
    """The first `SHORT_PROBE` of them, [1, positions]."""
    return probe_ids(model)[:, :SHORT_PROBE]


def _embedding_table(model: torch.nn.Module) -> Tensor:
    getter = getattr(model, "get_input_embeddings", None)
    try:
        module = getter() if getter is not None else None
    except (NotImplementedError, AttributeError):
        module = None
    if module is None or getattr(module, "weight", None) is None:
        module = next((m for m in model.modules() if isinstance(m, torch.nn.Embedding)), None)
    if module is None:
        raise RefusedError("No token embedding found", type(model).__name__, "there is nothing to look tokens up in")
    return module.weight  # type: ignore[return-value]


def expand(walk: StreamWalk, root: Value) -> list[Value]:
    """Every stream value behind `root`, itself included, in the order in which they were made."""
    seen: dict[int, Value] = {}
    pending = [root]
    while pending:
        value = pending.pop()
        if value.id not in seen:
            seen[value.id] = value
            pending.extend(term.value for term in walk.step(value).terms)
    return sorted(seen.values(), key=lambda value: value.id)


def _with_reads(walk: StreamWalk, values: list[Value], inputs: list[Value]) -> list[Value]:
    seen = {value.id: value for value in values}
    for value in inputs:
        seen |= {v.id: v for v in expand(walk, value)}
    return sorted(seen.values(), key=lambda value: value.id)


def _graph(
    walk: StreamWalk, values: list[Value], leaves: list[Value], root: Value, finder: SiteFinder
) -> tuple[StreamGraph, dict[int, int]]:
    node_of = {value.id: i for i, value in enumerate(values)}
    write_of = {leaf.id: i for i, leaf in enumerate(leaves)}
    nodes: list[Node] = []
    for value in values:
        step, dtype = walk.step(value), value.tensor.dtype
        if not step.terms:
            nodes.append(WriteNode(write_of[value.id], dtype))
        elif step.norm is not None:
            nodes.append(NormNode(node_of[step.terms[0].value.id], step.norm, dtype))
        else:
            terms = [
                Term(
                    node_of[term.value.id],
                    term.factor,
                    None if term.gate is None else Gate(finder.site(term.gate), term.gate_power, term.gate_factor),
                )
                for term in step.terms
            ]
            nodes.append(SumNode(tuple(terms), step.bias, dtype))
    return StreamGraph(tuple(nodes), node_of[root.id]), node_of


def _sizes(
    writes: list[Write],
    n_layers: int,
    d_model: int,
    d_vocab: int,
    labelled: Labelled,
    query: Mapping[Any, int],
) -> Sizes:
    cores = list({id(w.attention): w.attention for w in writes if w.attention is not None}.values())
    neurons = [w.projection.n_in for w in writes if w.neurons and w.projection and w.shared_expert is None]
    return Sizes(
        n_layers=n_layers,
        d_model=d_model,
        d_vocab=d_vocab,
        n_heads=merged([core.n_heads for core in cores]),
        n_key_value_heads=merged([core.n_key_value_heads for core in cores]),
        d_head=merged([core.channels.shape[1] for core in cores]),
        d_mlp=merged(neurons or labelled.expert_widths),
        n_experts=labelled.n_experts,
    )


def _tied(recording: Recording, unembedding: Tensor) -> bool:
    """Whether a token embedding is the same memory as the unembedding."""
    for value in recording.values:
        call = value.call
        if call is not None and call.name == "embedding" and value.active:
            tables = [o.tensor for o in call.operands() if o.parameter is not None]
            if any(t.data_ptr() == unembedding.data_ptr() for t in tables):
                return True
    return False


def _position_scheme(writes: list[Write]) -> str:
    return "added to the stream" if any(str(w.unit).startswith("embed.pos") for w in writes) else "not in the stream"


def _run_with_another_end(model: torch.nn.Module, ids: Tensor, forward: dict[str, Any]) -> Any:
    """The logits where the last token is another one."""
    changed = ids.clone()
    changed[0, -1] = ids[0, 0]
    return logits_of(model(input_ids=changed, **forward))


def _agree_before_the_end(logits: Tensor, other: Tensor) -> bool:
    """Whether the model is causal: another last token leaves the predictions at all earlier positions as they were."""
    difference = (logits[:, :-1].double() - other[:, :-1].double()).abs().max()
    return bool(difference <= 1e-3 * logits.double().abs().max())
