"""Laws of patching sweeps: a cell is one full forward, everything patched is the other run, a kill loses nothing."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import handmade
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mainstem
from mainstem import Edit
from mainstem.causal.changes import Change, set_by_position, set_to
from mainstem.causal.grouping import Start, batches
from mainstem.causal.patching import DIRECTIONS, Pair, Sweep, sweep
from mainstem.causal.patching_grids import Grid, grid
from mainstem.causal.replay import Replay
from mainstem.causal.sweep_state import SweepState
from mainstem.errors import (
    ChoiceError,
    LevelRefusedError,
    MainstemError,
    MetricError,
    NotFiniteError,
    PromptError,
    UsageError,
)
from mainstem.model.hooks import tapped
from mainstem.run.inputs import base_arguments
from mainstem.run.memory import LiveBytes
from mainstem.session import Model

SUFFIX = ["llama", "gpt2", "gemma2", "mixtral", "olmo2", "gpt_neox", "bloom", "falcon_h1", "deepseek_v3", "gpt_oss"]
"""Families whose cache lets runs begin at the first patched position."""

RESUMED = ["mamba", "jamba", "openai-gpt", "plain", "in_place", "shared_block", "post_norm", "mixed_back", "attributes"]
"""Models that run all positions, from the first patched block on."""

EXPERTS = {"mixtral", "deepseek_v3", "gpt_oss", "jamba"}
"""Where the other tokens of a prompt change how those before them are grouped, and so how sums are rounded."""

QUICK = {"llama", "in_place", "shared_block", "mixed_back"}
POSITIONS = 7


def named(names: list[str]) -> pytest.MarkDecorator:
    marks = {name: () if name in QUICK else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@cache
def opened(name: str) -> Model:
    return mainstem.open(build(name))


def prompts() -> tuple[Tensor, Tensor]:
    """Two prompts that differ from the third token on."""
    clean = zoo.prompt(POSITIONS, seed=3)
    other = zoo.prompt(POSITIONS, seed=4)
    return clean, torch.cat([clean[:, :2], other[:, 2:]], 1)


def first_logit(logits: Tensor) -> Tensor:
    return logits[:, 0].double()


def pair(metric: Callable[[Tensor], Tensor] = first_logit) -> Pair:
    return Pair(*prompts(), position=POSITIONS - 1, metric=metric)


def grid_for(name: str, kind: str, **options) -> Grid:
    return grid(opened(name).anatomy, kind, [str(i) for i in range(POSITIONS)], **options)


def swept(name: str, kind: str = "resid", metric: Callable[[Tensor], Tensor] = first_logit, **options) -> Sweep:
    model = opened(name)
    chosen = options.pop("grid", None) or grid_for(name, kind)
    return sweep(model.module, model.anatomy, pair(metric), chosen, **options, **base_arguments(model.module))


def logits_of(module: nn.Module, ids: Tensor, taps=()) -> Tensor:
    with torch.no_grad(), tapped(module, list(taps)):
        return module(input_ids=ids, **base_arguments(module)).logits[0, -1]


def one_by_one(name: str, made: Grid, base: Tensor, source: Tensor) -> list[Tensor]:
    """Each cell by a forward of its own, with taps that know nothing of batches."""
    module = opened(name).module
    seen: dict = {}

    def look(site):
        return site, lambda leaves: seen.__setitem__(site, leaves[site.slot].clone())

    logits_of(module, source, [look(site) for site in made.sites])

    def put(place, positions):
        def tap(leaves):
            new, given = leaves[place.site.slot].clone(), seen[place.site]
            entries = slice(None) if place.entries is None else place.entries
            for position in positions:
                if place.site.positions_first:
                    new[position][..., entries] = given[position][..., entries]
                elif new.dim() == 2:
                    new[position, entries] = given[position, entries]
                else:
                    new[:, position, entries] = given[:, position, entries]
            leaves = list(leaves)
            leaves[place.site.slot] = new
            return leaves

        return place.site, tap

    return [
        logits_of(module, base, [put(place, cell.positions) for place in cell.places]) for cell in made.cells if cell
    ]


class Lifted(TorchFunctionMode):
    """Everything that asks for float32 gets float64: what a model computes in less than its weights' dtype."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def lift(value):
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            return args[0].double()
        return func(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


# --- a sweep is its cells -----------------------------------------------------------------------------------


def vector(size: int) -> Callable[[Tensor], Tensor]:
    """A metric that every logit moves."""
    weights = torch.randn(size, generator=torch.Generator().manual_seed(5)).double()
    return lambda logits: logits.double() @ weights / weights.norm()


def compare(name: str, kind: str, direction, tolerance: float = 1e-4) -> Sweep:
    made = grid_for(name, kind)
    metric = vector(opened(name).anatomy.sizes.d_vocab)
    found = swept(name, kind, metric, grid=made, direction=direction)
    clean, corrupted = prompts()
    base, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    expected = metric(torch.stack(one_by_one(name, made, base, source)))
    values = found.values.flatten()[[i for i, cell in enumerate(made.cells) if cell]]
    assert float((values - expected).abs().max()) <= tolerance
    assert float((values - (found.corrupted if direction == "denoising" else found.clean)).abs().max()) > 1e-2
    return found


@named([*SUFFIX, *RESUMED])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_sweep_equals_its_cells_one_by_one(name: str, direction) -> None:
    found = compare(name, "resid", direction)
    assert found.run + found.identical == POSITIONS * len(found.rows)
    if name not in EXPERTS:  # the prompts begin with the same two tokens
        assert found.identical == 2 * len(found.rows)
    assert found.checked == 2 and found.error <= 1e-4
    assert any("first position" in note for note in found.notes) == (name in RESUMED)
    assert not any("first block" in note or "by itself" in note for note in found.notes)


@named(["llama", "gemma2", "shared_block"])
@pytest.mark.parametrize("kind", ["attn", "mlp", "heads", "heads-positions"])
def test_every_grid_equals_its_cells(name: str, kind: str) -> None:
    compare(name, kind, "denoising")


@named(["llama", "gpt2", "mixtral", "shared_block", "mamba"])
def test_in_float64_with_nothing_rounded_to_float32_the_cells_are_equal(name: str) -> None:
    with Lifted():
        module = (
            handmade.ALL[name]().double()
            if name in handmade.ALL
            else zoo.build(name, dtype=torch.float64, experts_implementation="eager")
        )
        opened.cache_clear()
        model = mainstem.open(module)
        made = grid(model.anatomy, "resid", [str(i) for i in range(POSITIONS)])
        clean, corrupted = prompts()
        sites, forward = made.sites, base_arguments(module)
        given = Replay(module, model.anatomy, clean, POSITIONS - 1, sites, **forward).blocks.values
        replay = Replay(module, model.anatomy, corrupted, POSITIONS - 1, sites, **forward)
        runs = {
            i: [Change(place.site, set_by_position(given[place.site]), cell.positions) for place in cell.places]
            for i, cell in enumerate(made.cells)
            if cell
        }
        worst = max(
            float((row - replay.alone(runs[i])).abs().max())
            for numbers, rows in replay.logits(runs)
            for i, row in zip(numbers, rows, strict=True)
        )
        assert replay.resumes and replay.in_batches
        assert worst <= 1e-9


@named([*SUFFIX, "mamba", "jamba", "openai-gpt", "plain", "in_place", "shared_block", "post_norm"])
def test_patching_every_write_gives_the_other_run(name: str) -> None:
    model = opened(name)
    clean, corrupted = prompts()
    sites = list(dict.fromkeys(write.site for write in model.anatomy.writes))
    forward = base_arguments(model.module)
    given = Replay(model.module, model.anatomy, clean, POSITIONS - 1, sites, **forward)
    replay = Replay(model.module, model.anatomy, corrupted, POSITIONS - 1, sites, **forward)
    every = [Change(site, set_by_position(given.blocks.values[site]), range(POSITIONS)) for site in sites]
    nothing = [Change(site, set_by_position(replay.blocks.values[site]), range(POSITIONS)) for site in sites]
    [(_, rows)] = replay.logits({0: every, 1: nothing})
    assert float((rows[0] - given.clean).abs().max()) <= 1e-4
    assert float((rows[1] - replay.clean).abs().max()) <= 1e-4
    assert float((given.clean - replay.clean).abs().max()) > 1e-2


@named(["llama", "mixtral", "in_place", "shared_block"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    module, (clean, _) = opened(name).module, prompts()
    before = logits_of(module, clean)
    swept(name)
    assert torch.equal(logits_of(module, clean), before)
    for inner in module.modules():
        assert not inner._forward_hooks and not inner._forward_pre_hooks and "forward" not in vars(inner)


# --- what cannot be trusted is found out --------------------------------------------------------------------


class Stale(nn.Module):
    """The third block reads what the first left behind in the model, besides its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.left = torch.zeros(1)
        first, third = model.blocks[0], model.blocks[2]  # type: ignore[index]
        inside, reading = first.forward, third.forward

        def leaves(x, mask):
            self.left = x.mean(1, keepdim=True)
            return inside(x, mask)

        def reads(x, mask):
            return reading(x, mask) + 0.3 * self.left

        first.forward, third.forward = leaves, reads

    def forward(self, input_ids, **kwargs):
        return self.model(input_ids, **kwargs)


def replayed(module: nn.Module) -> tuple[Replay, float]:
    """A replay of some changes of the stream, and how far its logits are from full forwards."""
    model = mainstem.open(module)
    sites = [block.input_site for block in model.anatomy.blocks]
    clean, corrupted = prompts()
    given = Replay(module, model.anatomy, clean, POSITIONS - 1, sites).blocks.values
    replay = Replay(module, model.anatomy, corrupted, POSITIONS - 1, sites)
    runs = {
        i: [Change(sites[i % len(sites)], set_by_position(given[sites[i % len(sites)]]), (i // len(sites),))]
        for i in range(len(sites) * POSITIONS)
    }
    made = {i: row for numbers, rows in replay.logits(runs) for i, row in zip(numbers, rows, strict=True)}
    assert made.keys() == runs.keys()
    return replay, max(float((made[i] - replay.alone(runs[i])).abs().max()) for i in runs)


def test_a_block_that_reads_what_another_left_behind_is_not_resumed_at() -> None:
    replay, worst = replayed(Stale(handmade.ALL["plain"]()).eval())
    assert not replay.resumes and worst <= 1e-5
    assert replay.notes == ["runs are computed from the first block on: block 2 alone does not return what it did"]


def test_rows_that_mix_are_run_by_themselves() -> None:
    replay, worst = replayed(handmade.Mixing())
    assert replay.resumes and not replay.in_batches and worst <= 1e-5
    assert "every run is made by itself" in replay.notes[-1]


def test_a_cache_that_lies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.causal.prefixes import Prefixes

    after = Prefixes.after

    def lying(self, *arguments):
        made = after(self, *arguments)
        made[self.name].layers[1].keys.mul_(1.5)
        return made

    monkeypatch.setattr(Prefixes, "after", lying)
    found = compare("llama", "resid", "denoising")
    assert any("first position" in note for note in found.notes)
    assert found.error <= 1e-4


# --- interruptions ------------------------------------------------------------------------------------------


class Kill(Exception):  # noqa: N818
    pass


def killed_after(batches_done: int):
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == batches_done:
            raise Kill

    return progress


@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path, torn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.causal.replay.LARGEST_BATCH", 4)
    whole, state = swept("llama"), tmp_path / "sweep.jsonl"
    with pytest.raises(Kill):
        swept("llama", state=state, progress=killed_after(3))
    lines = state.read_text().splitlines()
    assert 1 < len(lines) - 1 < whole.run
    if torn:
        state.write_text("\n".join(lines)[:-5])
    counts: list[tuple[int, int]] = []
    resumed = swept("llama", state=state, progress=lambda done, total: counts.append((done, total)))
    assert torch.equal(resumed.values, whole.values)
    assert counts[0][0] >= len(lines) - 1 and counts[-1] == (whole.run, whole.run)
    cells = [json.loads(line)["cell"] for line in state.read_text().splitlines()[1:]]
    assert sorted(cells) == sorted(set(cells)) and len(cells) == whole.run
    again = swept("llama", state=state, progress=lambda done, total: pytest.fail("nothing was left to run"))
    assert torch.equal(again.values, whole.values) and again.checked == 0


def test_the_state_of_another_sweep_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "sweep.jsonl"
    swept("llama", state=state)
    for options, what in (
        ({"direction": "noising"}, "direction"),
        ({"kind": "attn"}, "grid"),
        ({"identity": {"model": "another"}}, "model"),
        ({"metric": lambda logits: logits[:, 1].double()}, "metric"),
    ):
        with pytest.raises(UsageError, match=f"another sweep: its .*{what}.*delete this one"):
            swept("llama", state=state, **options)
    with pytest.raises(UsageError, match="cannot be kept"):
        swept("llama", state=tmp_path / "nowhere" / "sweep.jsonl")


HEADERS = [
    b"my precious notes",
    b"notes\nof another kind\n",
    b"\n",
    b"\xff\xfe\x00",
    b"[]",
    b"[" * 100_000,
    b'{"kind": "mainstem sweep"}\n',
    b'{"kind": "mainstem sweep", "of": 3, "measured": {}}\n',
    b'{"kind": "mainstem sweep", "of": {}, "measured": null}\n',
]


@pytest.mark.parametrize("content", HEADERS, ids=lambda content: repr(content[:60]))
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    state = tmp_path / "notes.txt"
    state.write_bytes(content)
    with pytest.raises(UsageError, match="not the state of a sweep.*Name another file"):
        SweepState(state, {"grid": "resid"}, {"clean": 1.0})
    assert state.read_bytes() == content


LINES = [b"", b"{", b"3", b"\xff", b'{"cell": 1}', b'{"cell": 1, "value": null}', b'{"cell": "1", "value": 2.0}']


@pytest.mark.parametrize("line", LINES)
def test_a_bad_line_is_named_and_a_torn_last_one_forgiven(tmp_path: Path, line: bytes) -> None:
    state = tmp_path / "sweep.jsonl"
    asked = state, {"grid": "resid"}, {"clean": 1.0}
    SweepState(*asked).add([0, 1], [0.5, math.nan])
    whole = state.read_bytes()
    state.write_bytes(whole + line)
    assert SweepState(*asked).done.keys() == {0, 1} and state.read_bytes() == whole
    state.write_bytes(whole + line + b'\n{"cell": 2, "value": 1.0}\n')
    with pytest.raises(UsageError, match="This line is no cell of a sweep .*, line 4"):
        SweepState(*asked)
    state.write_bytes(whole.split(b"\n")[0])
    assert SweepState(*asked).done == {}


def test_edits_that_hold_are_part_of_a_sweep(tmp_path: Path) -> None:
    model, state = opened("llama"), tmp_path / "sweep.jsonl"

    def made() -> Sweep:
        return model.patch(*(ids[0].tolist() for ids in prompts()), "id:7", "id:9", state=state)

    assert not made().warnings
    tiny = Edit.scale("L1.mlp", 1.0)  # no metric would tell
    with pytest.raises(UsageError, match="its edits differ"), model.edited(tiny):
        made()
    state.unlink()
    with model.edited(tiny):
        assert made().warnings == ("Every run was made under edits: scale L1.mlp x 1.",)
    with pytest.raises(UsageError, match="its edits differ"):
        made()


EDITS = [
    Edit.scale("L1.mlp", 0.5, positions=-1), Edit.zero("L1H1", positions=-2), Edit.knockout("L1H1", (1,)),
    Edit.scale("L1H1@2", 0.3),
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: str(edit.at))
@pytest.mark.parametrize("position", [-1, 5])
def test_a_sweep_under_an_edit_is_that_of_edited_runs_and_skips_as_much(edit: Edit, position: int) -> None:
    """Positions from the end are the whole prompt's, also where runs end at the destination or go on from a prefix."""
    model, (clean, corrupted) = opened("llama"), (ids[0].tolist() for ids in prompts())
    with model.edited(edit):
        sweep = model.patch(clean, corrupted, "id:7", "id:9", grid="heads", position=position)
        logits = [model.trace(ids, positions=(position,)).logits(position) for ids in (clean, corrupted)]
    assert not sweep.notes
    for logit, found in zip(logits, (sweep.clean, sweep.corrupted), strict=True):
        assert found == pytest.approx(float(logit[7] - logit[9]), abs=1e-5)


# --- memory -------------------------------------------------------------------------------------------------


@named(["llama", "gpt2", "plain"])
def test_a_sweep_stays_within_its_memory(name: str) -> None:
    least = 0
    with pytest.raises(UsageError, match="too few for a run. Allow") as refusal:
        swept(name, memory=1000)
    least = int(str(refusal.value).split("Allow ")[1].split(" ")[0].replace(",", ""))
    for memory in (least, 3 * least):
        live = LiveBytes()
        with live:
            swept(name, memory=memory)
        assert live.peak <= memory


def test_live_bytes_are_those_of_the_tensors_that_are_held() -> None:
    live = LiveBytes()
    with live:
        a = torch.zeros(1000)
        b = a[10:]
        c = a + 1
        assert live.live == 8000
        del a
        assert live.live == 8000  # b is a view of it
        del b
        assert live.live == 4000
        del c
    assert (live.live, live.peak) == (0, 8000)


# --- what is wrong is said ----------------------------------------------------------------------------------


def refused(error: type[MainstemError], match: str, name: str = "llama", **options) -> None:
    with pytest.raises(error, match=match) as seen:
        opened(name).patch(*(ids[0].tolist() for ids in prompts()), "id:7", "id:9", **options)
    assert str(seen.value).count(". ") >= 1  # what to do about it


def test_wrong_requests_are_refused_with_help() -> None:
    refused(ChoiceError, "Unknown grid 'residual'.*Did you mean 'resid'", grid="residual")
    refused(ChoiceError, "Unknown direction 'denoise'.*Did you mean 'denoising'", direction="denoise")
    refused(ChoiceError, "Unknown metric 'logits'", metric="logits")
    refused(UsageError, "takes no window.*attn, mlp, mixer", window=2)
    refused(UsageError, "A window of 4 does not fit 3 sublayers. Give 1 to 3", grid="attn", window=4)
    refused(UsageError, "needs units.*Name some", grid="neurons")
    refused(UsageError, "takes no units", units=["L0N1"])
    refused(LevelRefusedError, "No grid mixer: the model has no such sublayer. Take another grid", grid="mixer")
    refused(LevelRefusedError, "expert's neuron.*Patch the whole", "mixtral", grid="neurons", units=["L0E1N2"])
    refused(MetricError, "nothing|no recovery", metric=lambda logits: logits[:, 0] * 0 + 3)


def test_prompts_that_cannot_be_compared_are_refused() -> None:
    clean, corrupted = (ids[0].tolist() for ids in prompts())
    model = opened("llama")
    with pytest.raises(PromptError, match="clean prompt has 7 tokens and the corrupted one 6. Replace tokens one for"):
        model.patch(clean, corrupted[:-1], "id:7", "id:9")
    with pytest.raises(PromptError, match="The two prompts are the same. Replace at least one"):
        model.patch(clean, clean, "id:7", "id:9")


@pytest.mark.parametrize("layer", [0, 2])
def test_nan_after_a_change_names_the_first_layer(layer: int) -> None:
    model = opened("in_place")
    site = model.anatomy.blocks[layer].input_site
    replay = Replay(model.module, model.anatomy, prompts()[0], POSITIONS - 1, [site])
    with pytest.raises(NotFiniteError, match=rf"NaN or infinity after a change .L{layer}.attn"):
        list(replay.logits({0: [Change(site, set_to(float("inf")), (3,))]}))


def test_a_model_that_gives_nan_is_refused_before_anything_is_patched() -> None:
    model = mainstem.open(handmade.ALL["plain"]())
    model.anatomy  # noqa: B018
    with torch.no_grad():
        model.module.blocks[1].mlp.down.bias[3] = torch.nan
    with pytest.raises(NotFiniteError, match="L1.mlp"):
        model.patch(*(ids[0].tolist() for ids in prompts()), "id:7", "id:9")


# --- results, grids and batches -----------------------------------------------------------------------------


def test_the_session_gives_labels_recovery_and_provenance() -> None:
    clean, corrupted = (ids[0].tolist() for ids in prompts())
    made = opened("llama").patch(clean, corrupted, "id:7", "id:9", position=5)
    assert made.columns[0] == f"0 id:{clean[0]}" and made.columns[3] == f"3 id:{clean[3]}/id:{corrupted[3]}"
    assert len(made.columns) == 6 and made.rows == ("L0", "L1", "L2", "final")
    assert made.provenance is not None and made.metric == "logit-difference"
    assert float(made.recovery[-1, -1]) == pytest.approx(1, abs=1e-4)  # the final stream at the destination is all
    assert torch.equal(made.recovery[:, 0], torch.zeros(4).double())
    best = made.top(1)[0]
    assert best[2] == float(made.recovery.max())
    kl = opened("llama").patch(clean, corrupted, metric="kl", direction="noising", grid="attn", window=2)
    assert kl.rows == ("L0.attn to L1.attn", "L1.attn to L2.attn")
    assert kl.clean == pytest.approx(0, abs=1e-9) and kl.corrupted > 0 and kl.warnings
    neurons = opened("llama").patch(clean, corrupted, "id:7", "id:9", grid="neurons", units=["L0N1", "L1H2", "L2.mlp"])
    assert neurons.values.shape == (3, 1) and neurons.run == 3


def test_a_head_less_grid_has_holes_where_layers_have_fewer_heads() -> None:
    model = opened("llama")
    made = grid(model.anatomy, "heads", ["a", "b"])
    assert made.label(5) == "L1, H1" and len(made.cells) == len(made.rows) * len(made.columns)


@settings(max_examples=60)
@given(
    places=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=60),
    largest=st.integers(1, 20),
    resumes=st.booleans(),
    by_suffix=st.booleans(),
    late=st.booleans(),
)
def test_batches_hold_each_run_once_and_begin_with_its_earliest(places, largest: int, resumes, by_suffix, late) -> None:
    starts = {i: Start(position, block) for i, (block, position) in enumerate(places)}
    made = batches(starts, 8, 6, largest, resumes, by_suffix, late)
    assert sorted(run for batch in made for run in batch.runs) == list(starts)
    for batch in made:
        assert len(batch.runs) <= largest
        assert batch.start.position == (min(starts[run].position for run in batch.runs) if by_suffix else 0)
        assert batch.start.block == (min(starts[run].block for run in batch.runs) if resumes else 0)
