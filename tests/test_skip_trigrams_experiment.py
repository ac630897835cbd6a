"""Skip trigrams: claims that can fail, on numbers made by hand; the table against runs of a model; the quick form."""

import json
from dataclasses import replace

import pytest
import torch

import mainstem
from mainstem.analysis.skip_trigram_table import SkipTrigramTable, mean_table, skip_trigram_table
from mainstem.experiments import skip_trigrams as case
from mainstem.experiments.settings import Settings
from mainstem.experiments.skip_trigrams_claims import FORCED_OF, PLANTED_NAMES, SEED, Run, claims, curves, tables
from mainstem.lab.decoder import decoder
from mainstem.lab.decoder_config import DecoderConfig
from mainstem.lab.skip_trigrams import FORCED, PLANTED
from mainstem.report import as_html, as_json, as_text
from mainstem.weights.circuit_reading import circuits_of

NAMES = [*PLANTED_NAMES, *FORCED_OF]
OTHER = "river ... road -> perfect"


def made(**changes) -> Run:
    """A model that has learned everything as published."""
    run = Run(
        learning=[[0, 0.02], [600, 0.99]],
        learned=0.99,
        read=[*((name, 0.9) for name in PLANTED_NAMES), (OTHER, 0.2)],
        read_before=[(OTHER, 0.01)] * 9,
        heads={name: {"own": 12.0, "others": 0.5} for name in NAMES},
        spoken={name: 0.03 if name in FORCED_OF else 0.99 for name in NAMES},
        unspoken=dict.fromkeys(NAMES, 0.001),
    )
    return replace(run, **changes)


def findings(planted: list[Run], crossed: list[Run] | None = None) -> list[str]:
    """The findings of all claims."""
    return [claim.finding for claim in claims(planted, crossed or [made()])]


def test_all_hold_where_all_is_as_published():
    assert findings([made(), made()]) == ["reproduced"] * 5


@pytest.mark.parametrize(
    ("number", "changes", "expected"),
    [
        (0, {"learned": 0.7}, "in part"),
        (0, {"learned": 0.4}, "not reproduced"),
        (0, {"unspoken": dict.fromkeys(NAMES, 0.6)}, "not reproduced"),
        (1, {"read": [(OTHER, 0.95), *((name, 0.9) for name in PLANTED_NAMES)]}, "in part"),
        (1, {"read": [(OTHER, 0.95)] * 3 + [(name, 0.9) for name in PLANTED_NAMES]}, "not reproduced"),
        (1, {"read_before": [(PLANTED_NAMES[0], 0.1)]}, "in part"),
        (2, {"read": [*((n, 0.9) for n in PLANTED_NAMES if n != SEED), (OTHER, 0.2)]}, "in part"),
        (2, {"spoken": dict.fromkeys(NAMES, 0.5)}, "not reproduced"),
        (2, {"unspoken": dict.fromkeys(NAMES, 0.4)}, "not reproduced"),
        (3, {"heads": {n: {"own": 3.0 if n in FORCED_OF else 12.0, "others": 0.5} for n in NAMES}}, "not reproduced"),
        (3, {"heads": {n: {"own": 12.0, "others": 11.0} for n in NAMES}}, "not reproduced"),
        (3, {"heads": {n: {"own": -1.0, "others": 0.5} for n in NAMES}}, "not reproduced"),
    ],
)
def test_each_claim_can_fail(number, changes, expected):
    assert findings([made(), made(**changes)])[number] == expected


def test_a_bug_that_does_not_show_is_said():
    assert findings([made()], [made(unspoken=dict.fromkeys(NAMES, 0.03))])[4] == "not reproduced"
    one, two = FORCED_OF
    assert findings([made()], [made(spoken=made().spoken | {one: 0.001})])[4] == "in part"
    assert set(FORCED_OF) == {case._name(each) for each in FORCED}
    assert [FORCED_OF[name] for name in (one, two)] == ["keep ... in -> mind", "keep ... at -> bay"]
    assert case._name(PLANTED[0]) == SEED == PLANTED_NAMES[0]


@torch.no_grad()
def test_the_table_is_what_the_model_predicts_where_all_others_are_alike():
    config = DecoderConfig(vocab_size=20, d_model=16, n_heads=2, n_layers=1, norm="none", positions="none",
                           initializer_range=0.6)  # fmt: skip
    model = decoder(config, 1)
    opened = mainstem.open(model)
    circuits = [circuits_of(opened, head) for head in opened.weights.heads]
    direct = model.embed.weight @ model.unembed.weight.T
    filler, others = torch.zeros(2, 20)
    filler[7], others[7], others[11] = 1.0, 4.0, 1.0
    table = skip_trigram_table(direct, circuits, others, filler)
    for source, destination in ((3, 4), (9, 2), (5, 5)):
        ids = torch.tensor([[7, 7, source, 11, 7, 7, destination], [7, 7, 7, 11, 7, 7, destination]])
        seen, absent = model(ids).logits[:, -1].double()
        increase = seen.softmax(-1) - absent.softmax(-1)
        torch.testing.assert_close(table.increase[source, destination], increase, rtol=1e-4, atol=1e-6)
        added = seen - absent - (seen - absent).mean()
        torch.testing.assert_close(table.heads[source, destination], added, rtol=1e-4, atol=1e-5)
    (places, value), *_ = table.largest(3)
    assert value == pytest.approx(float(table.increase.max())) and table.increase[places] == table.increase.max()
    both = mean_table([table, SkipTrigramTable(table.heads + 2, table.increase + 2)], [3, 5])
    assert torch.equal(both.increase[3], table.increase[3] + 2) and torch.equal(both.increase[5], table.increase[5])
    torch.testing.assert_close(both.heads[7], table.heads[7] + 1)


def test_tables_and_curves_name_every_skip_trigram():
    read, named = tables([made()], [made()], [7])
    assert {row[2] for row in read.rows} >= set(PLANTED_NAMES) and {row[0] for row in read.rows} == {7}
    assert {row[1] for row in named.rows} == set(NAMES)
    assert set(curves({"planted": [made()], "crossed": [made()]}, [3]).lines) == {"planted, seed 3", "crossed, seed 3"}


@pytest.mark.slow
def test_the_quick_form_finds_what_was_planted(tmp_path):
    experiment = case.run(Settings(quick=True, folder=tmp_path))
    learned, read, example, forced, shown = experiment.claims
    assert learned.finding == example.finding == shown.finding == "reproduced"
    for name, shares in forced.values["shares"].items():  # more than to an output of any other source
        assert shares[0] >= 0.5 and shares[0] > forced.values["null"][name][0]
    assert read.values["found"][0] >= 7 > read.values["before"][0]
    assert json.loads(as_json(experiment))["command"] == "reproduce skip-trigrams"
    assert "keep ... in" in as_html(experiment) and "reproduced" in as_text(experiment)
