"""Induction while it is learned: claims that can fail, on numbers made by hand; probes on models made by hand."""

import json
from dataclasses import replace

import pytest
import torch

import mainstem
from mainstem.experiments import induction_training as case
from mainstem.experiments.induction_probes import InductionProbe, random_tokens, token_losses
from mainstem.experiments.induction_training_claims import ONE, SMEARED, TWO, Run, claims, curves, table
from mainstem.experiments.settings import Settings
from mainstem.lab.bigrams import RepeatedBigrams
from mainstem.lab.decoder import Decoder, decoder
from mainstem.lab.decoder_config import DecoderConfig
from mainstem.lab.training import next_token_loss
from mainstem.report import as_html, as_json, as_text
from mainstem.units import Unit

STEPS = [0, 250, 500, 750, 1000, 1250]
COMPOSED = {"reader": "L1H2", "writer": "L0H1", "q": 0.5, "k": 12.0, "v": 1.0, "writers": 2.0, "before": 0.3}
TAKEN = {"heads": ["L1H2"], "others": 1, "gained": 4.0, "lost": 3.5, "controls": [0.1, -0.1]}


def learning(prefix: list[float], repeats: list[float], in_context: list[float]) -> list[dict[str, float]]:
    """Probes of some steps."""
    return [
        {"step": step, "induction.prefix": p, "induction.previous": 0.5, "induction.repeats": r,
         "induction.unrepeated": 4.2, "induction.in_context": c}
        for step, p, r, c in zip(STEPS, prefix, repeats, in_context, strict=True)
    ]  # fmt: skip


RISES = learning([0.05, 0.05, 0.09, 0.6, 0.7, 0.8], [4.2, 4.2, 4.1, 0.6, 0.4, 0.3], [0, 0, -0.1, -3.6, -3.8, -4])
STAYS = learning([0.05] * 6, [4.2] * 6, [0.0, -0.1, -0.1, -0.1, -0.1, -0.1])
SLOWLY = learning([0.05, 0.09, 0.2, 0.3, 0.4, 0.6], [4.2, 2, 1.5, 1, 0.6, 0.3], [0, -2, -3, -3, -3.5, -4])


def findings(two: list[Run] | None = None, one: list[Run] | None = None, smeared: list[Run] | None = None) -> list[str]:
    """The findings of all claims."""
    made = {
        TWO: two or [Run(RISES, {}, COMPOSED, TAKEN)],
        ONE: one or [Run(STAYS, {}, None, None)],
        SMEARED: smeared or [Run(RISES, {}, None, TAKEN)],
    }
    return [claim.finding for claim in claims(made)]


def two(**changes) -> list[Run]:
    """A model of two layers as published, and one that is otherwise."""
    return [Run(RISES, {}, COMPOSED, TAKEN), replace(Run(RISES, {}, COMPOSED, TAKEN), **changes)]


def test_all_hold_where_all_is_as_published():
    assert findings() == ["reproduced"] * 6


def test_the_window_is_from_the_last_low_score_to_the_first_high_one():
    window = Run(RISES, {}, None, None).window
    assert (window.first, window.last, window.share) == (500, 750, 0.2)
    assert Run(STAYS, {}, None, None).window is None
    assert Run(RISES, {}, None, None).change_inside("repeats") == pytest.approx(3.5 / 3.9)
    rising = learning([0.05, 0.05, 0.09, 0.6, 0.7, 0.8], [1, 1, 1, 2, 2, 2], [0] * 6)
    assert Run(rising, {}, None, None).change_inside("repeats") == 0.0


@pytest.mark.parametrize(
    ("number", "changes", "expected"),
    [
        (0, {"probes": STAYS}, "not reproduced"),
        (0, {"probes": [row | {"induction.prefix": row["induction.prefix"] / 2} for row in RISES]}, "in part"),
        (1, {"probes": STAYS}, "not reproduced"),
        (1, {"probes": SLOWLY}, "not reproduced"),
        (2, {"probes": SLOWLY}, "not reproduced"),
        (4, {"composed": COMPOSED | {"k": 1.0}}, "not reproduced"),
        (4, {"composed": COMPOSED | {"writers": 20.0}}, "in part"),
        (4, {"composed": COMPOSED | {"before": 9.0}}, "in part"),
        (5, {"taken": None}, "not reproduced"),
        (5, {"taken": TAKEN | {"lost": 0.1}}, "not reproduced"),
        (5, {"taken": TAKEN | {"lost": 1.2}}, "in part"),
        (5, {"taken": TAKEN | {"controls": [3.6]}}, "not reproduced"),
        (5, {"taken": TAKEN | {"heads": ["L1H0", "L1H1", "L1H2"]}}, "in part"),
        (5, {"taken": TAKEN | {"others": 0, "controls": [0.0]}}, "not reproduced"),
    ],
)
def test_each_claim_can_fail(number, changes, expected):
    assert findings(two(**changes))[number] == expected


def test_one_layer_that_does_it_too_is_said():
    assert findings(one=[Run(RISES, {}, None, None)])[0] == "not reproduced"
    assert findings(smeared=[Run(STAYS, {}, None, None)])[3] == "not reproduced"
    assert findings(one=[Run(RISES, {}, None, None)])[3] == "not reproduced"
    a_little = learning([0.05, 0.1, 0.2, 0.3, 0.3, 0.3], [4.2] * 6, [0] * 6)
    assert findings(smeared=[Run(a_little, {}, None, None)])[3] == "in part"


def test_a_claim_needs_a_window_to_be_shown():
    found = findings([Run(STAYS, {}, COMPOSED, TAKEN)])
    assert found[:3] == ["not reproduced"] * 3


# --- what is measured ---------------------------------------------------------------------------------------

TEXT = RepeatedBigrams(d_vocab=64, length=64, batch=8, segment=(20, 30))


def model(**options) -> Decoder:
    return decoder(DecoderConfig(vocab_size=64, d_model=64, n_layers=1, n_heads=2, max_positions=64, **options), 0)


def looking_at_what_was_before() -> Decoder:
    """One layer whose first head, by smeared keys that are all of the one before, looks at the token after a copy."""
    made = model(norm="none", positions="none", smeared_keys=True, initializer_range=0.0)
    table = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).Q
    made.embed.weight.data, made.unembed.weight.data = table, table.clone()
    attention = made.blocks[0].attention
    attention.smear.data.fill_(-40.0)
    attention.write.weight.data = torch.eye(64)
    attention.read.weight.data[:32] = 200 * torch.eye(64)[:32]
    attention.read.weight.data[64:96] = torch.eye(64)[:32]
    return made


def test_prefix_matching_is_seen_where_it_is_planted():
    planted, none = looking_at_what_was_before(), model()
    for made, at_least, at_most in ((planted, 0.6, 1.0), (none, 0.0, 0.1)):
        probe = InductionProbe(mainstem.open(made).anatomy, TEXT)
        assert at_least <= probe.heads(made, "prefix")[Unit.parse("L0H0")] <= at_most
        assert probe(made)["prefix"] == max(probe.heads(made, "prefix").values())


def test_losses_are_those_of_training():
    made, ids = model(), TEXT(3)
    losses = token_losses(made, ids)
    assert float(losses[:, 1:].mean()) == pytest.approx(float(next_token_loss(made, ids).detach()), rel=1e-5)
    assert not losses[:, 0].any()
    found = InductionProbe(mainstem.open(made).anatomy, TEXT)(made)
    assert found["repeats"] == pytest.approx(found["unrepeated"], abs=0.1)
    assert abs(found["in_context"]) < 0.2
    assert 0 not in random_tokens(TEXT).pool


def test_composition_and_ablation_of_an_untrained_model_are_nothing():
    untrained = mainstem.open(
        decoder(DecoderConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4, max_positions=64))
    )
    found = case.composition_of(untrained, Unit.parse("L1H0"), Unit.parse("L0H1"))
    assert all(abs(found[name]) < 6 for name in ("q", "k", "v", "writers"))
    known = [f"L{layer}H{head}" for layer in (0, 1) for head in range(4)]
    taken = case.without(untrained, ["L1H0"], known, TEXT)
    assert abs(taken["lost"]) < 0.05 and len(taken["controls"]) == case.DRAWS
    assert taken["others"] == 1
    assert case.without(untrained, [], known, TEXT) is None


def test_tables_and_curves_have_every_model():
    runs = {TWO: [Run(RISES, {}, COMPOSED, TAKEN)] * 2, ONE: [Run(STAYS, {}, None, None)] * 2}
    assert [row[:2] for row in table(runs, [3, 4]).rows] == [[TWO, 3], [TWO, 4], [ONE, 3], [ONE, 4]]
    assert set(curves(runs, [3, 4])[0].lines) == {f"{arm}, seed {s}" for arm in (TWO, ONE) for s in (3, 4)}


@pytest.mark.slow
def test_the_quick_form_sees_induction_form(tmp_path):
    experiment = case.run(Settings(quick=True, folder=tmp_path))
    forms, repeats, in_context, smears, composes, removed = experiment.claims
    assert forms.finding == "reproduced" and forms.values["one layer"][0] < 0.1 < 0.5 <= forms.values["end"][0]
    assert repeats.finding == smears.finding == "reproduced"
    assert in_context.values["inside"][0] > in_context.values["share of the steps"][0]
    assert composes.values["k"][0] > 3 > composes.values["before"][0]
    assert removed.values["lost"][0] >= 0.5 > removed.values["random"][0]
    assert json.loads(as_json(experiment))["command"] == "reproduce induction"
    assert "induction heads" in as_html(experiment) and "reproduced" in as_text(experiment)
