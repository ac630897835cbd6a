"""Subspaces: their overlaps beside random ones, the stream's bandwidth, planted erasers."""

import json

import pytest
import torch
from handmade import ALL
from hypothesis import given, settings
from hypothesis import strategies as st

import mainstem
from mainstem.analysis import subspace
from mainstem.analysis.bandwidth import bandwidth, effective_rank
from mainstem.analysis.erasers import cosines, eigenvalue_sign
from mainstem.analysis.factored import Factored
from mainstem.analysis.false_discovery import q_values
from mainstem.analysis.subspace import expected_overlap, overlap, span
from mainstem.errors import ChoiceError, MainstemError, UnitError, UsageError
from mainstem.report import as_html, as_json, as_text
from mainstem.report.parquet import as_parquet
from mainstem.session import Model

D = 48


def gaussian(rows: int, seed: int, width: int = D) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def frame(seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(gaussian(D, seed)).Q


# --- spans and overlaps -----------------------------------------------------------------------------------


def test_random_subspaces_overlap_as_the_formula_says() -> None:
    """Within three standard errors, of the mean and of the spread, by draws that share nothing with the null's own."""
    first, second, count = 5, 9, 400
    found = torch.tensor([
        (span(gaussian(first, 2 * i)).directions @ span(gaussian(second, 2 * i + 1)).directions.T).square().sum()
        for i in range(count)
    ])  # fmt: skip
    mean, spread = expected_overlap(first, second, D)
    assert abs(float(found.mean()) - mean) < 3 * spread / count**0.5
    assert abs(float(found.std()) / spread - 1) < 3 / (2 * count) ** 0.5


def test_the_sampled_null_is_the_analytic_one() -> None:
    made = overlap(span(gaussian(6, 1)), span(gaussian(11, 2)), draws=1000)
    assert abs(made.sampled - made.expected) < 3 * made.spread / 1000**0.5
    assert abs(made.sampled_spread / made.spread - 1) < 0.1
    assert made.verdict == "as random"


def test_p_values_of_random_pairs_are_uniform() -> None:
    found = [overlap(span(gaussian(4, 2 * i)), span(gaussian(6, 2 * i + 1)), draws=99, seed=i) for i in range(60)]
    for p in (torch.tensor([one.p_shared for one in found]), torch.tensor([one.p_disjoint for one in found])):
        assert abs(float(p.mean()) - 0.5) < 3 * (1 / 12 / 60) ** 0.5
        assert int((p <= 0.1).sum()) < 15


def test_planted_disjoint_and_shared_subspaces_are_told_apart() -> None:
    basis = frame()
    first = gaussian(20, 3, 12) @ basis[:12]
    across, inside = gaussian(20, 4, 14) @ basis[12:26], gaussian(20, 5, 6) @ basis[6:12]
    disjoint, shared = overlap(span(first), span(across)), overlap(span(first), span(inside))
    assert disjoint.verdict == "disjoint" and disjoint.overlap == pytest.approx(0, abs=1e-20)
    assert shared.verdict == "shared" and shared.overlap == pytest.approx(6)
    assert max(shared.angles) == pytest.approx(0, abs=1e-5) and min(disjoint.angles) == pytest.approx(90)


def test_a_mutation_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A null that does not orthonormalise its draws calls random subspaces anything but random."""
    solve = torch.linalg.solve_triangular
    monkeypatch.setattr(subspace.torch.linalg, "solve_triangular", lambda lower, made, **_: made / D**0.5 * 1.5)
    wrong = overlap(span(gaussian(6, 1)), span(gaussian(11, 2)))
    monkeypatch.setattr(subspace.torch.linalg, "solve_triangular", solve)
    assert abs(wrong.sampled - wrong.expected) > 3 * wrong.spread / wrong.draws**0.5
    assert wrong.verdict != overlap(span(gaussian(6, 1)), span(gaussian(11, 2))).verdict


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 1000))
def test_overlaps_are_symmetric_and_unturned(first: int, second: int, seed: int) -> None:
    a, b, turn = gaussian(first, seed), gaussian(second, seed + 1), frame(seed + 2)
    forth, back = (overlap(span(x), span(y), draws=3) for x, y in ((a, b), (b, a)))
    turned = overlap(span(a @ turn), span(b @ turn), draws=3)
    for other in (back, turned):
        assert other.overlap == pytest.approx(forth.overlap)
        assert other.weighted == pytest.approx(forth.weighted)
    assert forth.overlap == pytest.approx(float(torch.tensor(forth.angles).deg2rad().cos().square().sum()), rel=1e-4)


def test_the_weighted_overlap_is_the_squared_composition() -> None:
    a, b = gaussian(5, 1), gaussian(7, 2)
    made = overlap(span(a), span(b), draws=2000)
    assert made.weighted == pytest.approx(float((a @ b.T).square().sum() / a.square().sum() / b.square().sum()))
    assert made.weighted_expected == pytest.approx(1 / D)


def test_spans_hold_energy_and_rank() -> None:
    basis = frame()
    rows = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)) @ basis[:3]
    assert len(span(rows, rank=2)) == 2 and span(rows, rank=2).energy == pytest.approx(13 / 14)
    assert [len(span(rows, energy=share)) for share in (0.5, 9 / 14, 0.9, 0.95, 1.0)] == [1, 1, 2, 3, 3]
    assert span(torch.cat([rows, rows])).rank == 3


@pytest.mark.parametrize(
    "rows, options",
    [
        (torch.zeros(2, 4), {}),
        (torch.full((2, 4), torch.nan), {}),
        (torch.eye(4), {"rank": 5}),
        (torch.eye(4), {"rank": 0}),
        (torch.eye(4), {"energy": 0.0}),
        (torch.eye(4), {"energy": 1.5}),
        (torch.eye(4), {"rank": 1, "energy": 0.5}),
    ],
)
def test_what_spans_nothing_is_refused(rows: torch.Tensor, options: dict) -> None:
    with pytest.raises(UsageError):
        span(rows, **options)


def test_the_whole_stream_leaves_nothing_to_test() -> None:
    made = overlap(span(frame()), span(gaussian(3, 1)))
    assert made.verdict == "no test" and made.overlap == pytest.approx(3) == made.expected


# --- bandwidth --------------------------------------------------------------------------------------------


def test_effective_ranks_of_known_spectra() -> None:
    points = torch.cat([torch.eye(6), -torch.eye(6)])
    flat = effective_rank(points)
    assert flat.participation == pytest.approx(6) and flat.entropy == pytest.approx(6)
    line = effective_rank(points[:, :1] * torch.ones(1, 4))
    assert line.participation == pytest.approx(1) == line.entropy


def test_the_blocks_shares_add_up_and_find_the_writer() -> None:
    embed, write = gaussian(30, 1), torch.zeros(30, D, dtype=torch.float64)
    write[:, 7] = gaussian(30, 2)[:, 0] - embed[:, 7]  # the block takes a dimension over
    made = bandwidth([embed, embed + write])
    assert made.unexplained < 1e-12
    assert int(made.shares[1].argmax()) == 7 and bool((made.shares[1, :7] == 0).all())
    erased = embed.clone()
    erased[:, 3] *= 0.5
    assert float(bandwidth([embed, erased]).shares[1, 3]) == pytest.approx(-1)
    with pytest.raises(UsageError):
        bandwidth([embed[:2], embed[:2]])


# --- erasers ----------------------------------------------------------------------------------------------


def test_a_planted_eraser_is_found_and_nothing_else_is() -> None:
    neurons, width = 150, 64
    reading, writing = (gaussian(neurons, seed, width) for seed in (1, 2))
    shared = gaussian(1, 3, width)
    reading, writing = reading + 0.5 * shared, writing - 0.5 * shared  # all lean on one direction, against each other
    writing[17] = -2 * reading[17]
    made = cosines(reading, writing)
    assert (q_values(made.p) <= 0.05).nonzero().flatten().tolist() == [17]
    assert float(made.cosine[17]) == pytest.approx(-1, abs=1e-6)
    assert made.null_mean < -0.05


def test_a_neuron_that_is_zero_has_no_cosine() -> None:
    reading = gaussian(10, 1)
    reading[4] = 0
    made = cosines(reading, gaussian(10, 2))
    assert bool(made.cosine[4].isnan()) and float(made.p[4]) == 1


def test_heads_that_negate_are_told_from_heads_that_copy() -> None:
    rows = gaussian(8, 1)
    negating, copying = eigenvalue_sign(Factored(-rows.T, rows)), eigenvalue_sign(Factored(rows.T, rows))
    assert negating.sign == pytest.approx(-1) and negating.p < 1e-6
    assert copying.sign == pytest.approx(1) and copying.p > 0.999
    assert eigenvalue_sign(Factored(gaussian(8, 2).T, rows)).p > 0.01
    assert eigenvalue_sign(Factored(0 * rows.T, rows)).p == 1


# --- a model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted() -> Model:
    """Random weights, but one neuron that writes against its up row."""
    module = ALL["in_place"]()
    with torch.no_grad():
        mlp = module.blocks[1].mlp
        mlp.down.weight[:, 5] = -3 * mlp.up.weight[5] * module.blocks[1].norm2.gain
    return mainstem.open(module)


IDS = list(range(10, 40))


def test_the_planted_eraser_of_a_model_is_found_alone_and_confirmed(planted: Model) -> None:
    made = planted.erasers(IDS)
    assert made.facts["found"] == 1 and (made.rows[0]["unit"], made.rows[0]["role"]) == ("L1N5", "up")
    tried = made.facts["confirmation"]
    assert [row["unit"] for row in tried] == ["L1N5"]
    assert tried[0]["prediction_error"] < 1e-3
    assert made.facts["neurons"] == 3 * 96


def test_without_the_plant_nothing_is_found() -> None:
    made = mainstem.open(ALL["in_place"]()).erasers(IDS)
    assert made.facts["found"] == 0 and made.facts["confirmation"] == [] and made.verdict.startswith("nothing erases")


def test_what_a_neuron_writes_is_what_it_reads_against(planted: Model) -> None:
    made = planted.compare_subspaces("L1N5.write", "L1N5.up", draws=99)
    assert made.verdict == "shared" and made.rows[0]["cosine"] == pytest.approx(1, abs=1e-4)
    assert planted.compare_subspaces("L1N5.write", "L1N5.gate", draws=99).verdict != "shared"


def test_sets_have_a_map_of_their_pairs(planted: Model) -> None:
    made = planted.compare_subspaces("L0H0.write+L0H1.write", "L1H2.key+L1.mlp.gate", draws=9)
    assert made.facts["first"]["units"] == ["L0H0.write", "L0H1.write"]
    assert [len(row) for row in made.maps[0].values] == [2, 2]


def test_shares_of_a_model_add_up(planted: Model) -> None:
    made = planted.bandwidth(IDS)
    assert made.facts["unexplained"] < 1e-5
    assert [row["layer"] for row in made.rows] == ["embed", "L0", "L1", "L2"]
    assert sum(row["share"] for row in made.rows) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "first, second, error",
    [
        ("L9H0.write", "L0H0.key", UnitError),
        ("L0H9.write", "L0H0.key", UnitError),
        ("L0H0", "L0H0.key", UnitError),
        ("L0H0.writes", "L0H0.key", ChoiceError),
        ("L0.mlp.query", "L0H0.key", UnitError),
        ("L0N3.query", "L0H0.key", MainstemError),
        ("L0H0.gate", "L0H0.key", MainstemError),
        ("L0N96.write", "L0H0.key", UnitError),
    ],
)
def test_sides_that_do_not_exist_are_refused(planted: Model, first: str, second: str, error: type) -> None:
    with pytest.raises(error):
        planted.compare_subspaces(first, second)


def test_a_side_of_zero_norm_is_refused() -> None:
    module = ALL["in_place"]()
    with torch.no_grad():
        module.blocks[0].mlp.down.weight[:, 2] = 0
    model = mainstem.open(module)
    with pytest.raises(UsageError, match="zero"):
        model.compare_subspaces("L0N2.write", "L0H0.key")
    assert model.erasers(IDS).facts["roles"][0]["undefined"] == 1


def test_readings_are_rendered(planted: Model, tmp_path) -> None:
    for made in (planted.compare_subspaces("L0H0.write", "L1H0.key", draws=9), planted.bandwidth(IDS)):
        document = json.loads(as_json(made))
        assert document["schema"] == f"mainstem/subspace/{made.subject}/1"
        assert made.verdict.split()[0] in as_text(made, 100) and "</html>" in as_html(made)
        pytest.importorskip("pyarrow")
        (tmp_path / "rows.parquet").write_bytes(as_parquet(made))
        import pyarrow.parquet as pq

        assert pq.read_table(tmp_path / "rows.parquet").num_rows == len(made.rows)
