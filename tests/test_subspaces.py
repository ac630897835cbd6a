"""Two tasks in one stream: prompts, claims that can fail, what is measured of a small model, the quick form."""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import mainstem
from mainstem.experiments import subspaces
from mainstem.experiments import subspaces_claims as case
from mainstem.experiments.settings import Settings
from mainstem.experiments.subspaces_claims import Common, Lying, Run
from mainstem.lab.decoder import decoder
from mainstem.lab.decoder_config import DecoderConfig
from mainstem.lab.two_tasks import D_VOCAB, DIGITS, LETTERS, SYMBOLS, ask, combinations, loss_of, of_task, task_batches
from mainstem.report import as_html, as_json, as_text

# --- prompts ------------------------------------------------------------------------------------------------


def test_a_prompt_has_its_symbols_and_answers() -> None:
    asked = ask(torch.tensor([[3, 7, 1, 4]]), "by turns", DIGITS, 1)
    assert asked.ids.tolist() == [[3, SYMBOLS + 7, 1, SYMBOLS + 4, 2 * SYMBOLS + 3]]
    assert asked.answers.tolist() == [[1, 7]] and asked.pairs.tolist() == [[31, 74]]


def test_questions_differ_by_task_only_where_tasks_are_done_by_turns() -> None:
    symbols = torch.zeros(1, 4, dtype=torch.long)
    asked = {
        way: {
            (task, wording): int(ask(symbols, way, task, wording).ids[0, -1]) for task in (0, 1) for wording in (0, 1)
        }
        for way in subspaces.WAYS
    }
    assert len(set(asked["by turns"].values())) == 4 and max(asked["by turns"].values()) < D_VOCAB
    assert asked["together"][0, 0] == asked["together"][1, 0] != asked["together"][0, 1] == asked["together"][1, 1]


def test_combinations_are_split_without_overlap() -> None:
    training, testing = combinations(0)
    rows = [tuple(row) for row in torch.cat([training, testing]).tolist()]
    assert len(rows) == len(set(rows)) == SYMBOLS**4 and len(testing) == 2000
    assert not torch.equal(training, combinations(1)[0])


def test_a_batch_depends_on_its_step_and_has_every_question() -> None:
    training = combinations(0)[0]
    batch = task_batches(training, "by turns", 8, seed=0)
    ids, answers, tasks = batch(3)
    assert ids.shape == (32, 5) and answers.shape == (32, 2) and Counter(tasks.tolist()) == {0: 16, 1: 16}
    assert set(Counter(ids[:, -1].tolist()).values()) == {8}
    assert all(
        torch.equal(a, b) for a, b in zip(batch(3), task_batches(training, "by turns", 8, seed=0)(3), strict=True)
    )
    assert not torch.equal(ids, batch(4)[0])


class Knowing(torch.nn.Module):
    """Gives high logits to the earlier letter and the larger digit, whatever is asked."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> object:
        logits = torch.zeros(*input_ids.shape, D_VOCAB)
        letters, digits = input_ids[:, [0, 2]].min(1).values, input_ids[:, [1, 3]].max(1).values
        for token in (letters, digits):
            logits[torch.arange(len(token)), -1, token] = 50.0
        return type("Output", (), {"logits": logits})


def test_losses_are_those_of_what_is_asked_for() -> None:
    batch = {way: task_batches(combinations(0)[0], way, 8, seed=0)(0) for way in subspaces.WAYS}
    assert float(loss_of("together")(Knowing(), batch["together"])) < 1e-6
    one_of_two = float(loss_of("by turns")(Knowing(), batch["by turns"]))
    assert one_of_two == pytest.approx(float(torch.tensor(2.0).log()), abs=1e-5)


# --- the rules, by hand -------------------------------------------------------------------------------------

SHARED = Lying(7.0, 0.77, 0.14, 1.0, 0.002, "shared")
APART = Lying(0.1, 0.77, 0.14, 0.002, 1.0, "disjoint")
CHANCE = Lying(0.8, 0.77, 0.14, 0.6, 0.4, "as random")
FEW, MANY, USUAL = Common(0, 7.0, 1e-4, 1.0), Common(28, 7.0, 1.0, 1e-9), Common(7, 7.0, 0.6, 0.6)


def run(**changes: object) -> Run:
    made = Run(
        losses=[2.0, 0.01],
        sizes={"letters": 7, "digits": 7},
        plain={"letters": 1.0, "digits": 0.98},
        chance={"letters": 0.19, "digits": 0.19},
        frozen={"letters": {"letters": 0.2, "digits": 0.97}, "digits": {"letters": 0.99, "digits": 0.2}},
        again={"letters": 0.2, "digits": 0.2},
        random={"letters": [1.0, 0.99], "digits": [0.98, 0.97]},
        between=APART,
        same={"letters": SHARED, "digits": SHARED},
        neurons=FEW,
        same_neurons={"letters": MANY, "digits": MANY},
        heads={"letters": [0.7, 0.0], "digits": [0.0, 0.4]},
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "reproduced"),
        ({"between": CHANCE}, "in part"),
        ({"between": SHARED}, "not reproduced"),
        ({"same": {"letters": SHARED, "digits": CHANCE}}, "not reproduced"),  # a measure that sees nothing share
    ],
)
def test_subspaces_must_be_smaller_in_common_than_random_ones(changes: dict, expected: str) -> None:
    assert case.apart_claim([run(), run(**changes), run()]).finding == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "reproduced"),
        ({"neurons": USUAL}, "in part"),
        ({"neurons": MANY}, "not reproduced"),
        ({"same_neurons": {"letters": MANY, "digits": USUAL}}, "not reproduced"),
    ],
)
def test_neurons_must_be_fewer_in_common_than_of_random_sets(changes: dict, expected: str) -> None:
    assert case.neurons_claim([run(), run(**changes)]).finding == expected


def frozen(own: float = 0.2, other: float = 0.97) -> dict[str, dict[str, float]]:
    return {"letters": {"letters": own, "digits": other}, "digits": {"letters": 0.99, "digits": 0.2}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "reproduced"),
        ({"frozen": frozen(own=0.6)}, "in part"),
        ({"frozen": frozen(other=0.6)}, "in part"),
        ({"random": {"letters": [1.0, 0.5], "digits": [0.98, 0.97]}}, "in part"),
        ({"random": {"letters": [1.0, 0.1], "digits": [0.98, 0.97]}}, "not reproduced"),
        ({"frozen": frozen(own=0.2, other=0.1)}, "not reproduced"),
        ({"frozen": frozen(own=1.0)}, "not reproduced"),
    ],
)
def test_freezing_must_take_one_task_and_leave_the_other(changes: dict, expected: str) -> None:
    assert case.freezing_claim([run(), run(**changes)]).finding == expected


def test_common_neurons_beside_random_sets() -> None:
    ten = list(range(10, 0, -1))
    same, none = case.common(ten, ten, top=3), case.common(ten, ten[::-1], top=3)
    assert (same["count"], none["count"], same["expected"]) == (3, 0, 0.9)
    assert same["p_many"] == pytest.approx(1 / 120) and none["p_few"] == pytest.approx(35 / 120)
    assert same["p_few"] == pytest.approx(1) and none["p_many"] == pytest.approx(1)


def test_all_claims_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = json.loads(json.dumps(asdict(run())))
    monkeypatch.setattr(subspaces, "trained", lambda *_: made)
    for _ in range(2):
        found = subspaces.run(Settings(folder=tmp_path))
    assert [claim.finding for claim in found.claims] == ["reproduced"] * 3 + ["measured"]
    assert found.notes[-1].startswith("6 of 6 results were kept")
    for shown in (as_text(found), as_html(found), as_json(found)):
        assert "by turns" in shown


# --- a small model ------------------------------------------------------------------------------------------


def test_an_untrained_model_is_measured_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("FOUND", 300), ("TESTED", 64), ("TRIED", 16), ("D_MLP", 40), ("DRAWN", 2)):
        monkeypatch.setattr(subspaces, name, small)
    net = decoder(DecoderConfig(D_VOCAB, 32, 1, 4, 40, norm="rms"), seed=0).eval()
    ids = ask(combinations(0)[1][:4], "together", LETTERS, 0).ids
    before = net(input_ids=ids).logits
    made = subspaces.measured(net, "together", *combinations(0), seed=0)
    assert torch.equal(net(input_ids=ids).logits, before)
    one = Run.of(json.loads(json.dumps({"losses": [1.0], **made})))
    assert len(one.heads["letters"]) == 4 and len(one.random["digits"]) == 2
    assert one.same["letters"].verdict == "shared" and one.plain["letters"] < 0.5
    assert case.freezing_claim([one]).finding == "not reproduced"


def test_freezing_everything_leaves_nothing_that_differs_between_prompts() -> None:
    net = decoder(DecoderConfig(D_VOCAB, 32, 1, 4, 40, norm="rms"), seed=0).eval()
    at = subspaces._place(mainstem.open(net), subspaces.AT)
    asked = ask(combinations(0)[1][:8], "together", LETTERS, 0)
    mean = at.values(asked.ids)[:, 0].mean(0)
    logits = at.logits(asked.ids, mean.expand(8, 1, -1), torch.eye(32)).detach()
    assert torch.allclose(logits, logits[:1].expand_as(logits), atol=1e-5)
    assert of_task(logits, DIGITS).shape == (8, SYMBOLS)


@pytest.mark.slow
def test_tasks_that_are_done_together_are_apart_in_the_quick_form() -> None:
    found = subspaces.run(Settings(quick=True))
    apart, neurons, freezing, turns = found.claims
    assert apart.finding == freezing.finding == "reproduced"
    assert max(neurons.values["common"]) < neurons.values["expected"] < min(neurons.values["same"])
    assert min(turns.values["overlap"]) > max(apart.values["overlap"])
