"""Experiments: prompts that ask for facts, intervals that cover, and claims that can fail."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import mainstem
from mainstem.analysis.scores import PUBLISHED
from mainstem.analysis.statistics import difference, interval
from mainstem.causal.outcomes import NAMED, RANDOM, Outcome
from mainstem.experiments import knowledge, paris
from mainstem.experiments.knowledge_claims import claims
from mainstem.experiments.knowledge_runs import PromptRun
from mainstem.experiments.outcome import Experiment
from mainstem.experiments.prompts import Prompt, known, written
from mainstem.report import as_html, as_json, as_text
from mainstem.units import Unit

SCORES = [*PUBLISHED, "additive"]


def out(p: float) -> Outcome:
    """An outcome with a probability, and a rank that goes with it."""
    import math

    rank = 1.0 if p > 0.3 else 5.0
    return Outcome(p, math.log(p), rank, 1 / rank)


def prompt_run(relation: str, compared: dict[str, float], after: float, rivals: float, number: int) -> PromptRun:
    """One prompt's numbers made by hand: 0.5 before, `after` without the top units, `rivals` without the rivals'."""
    sizes = ("25 + 75", "100 + 200")
    taken = {f"{name} {size}": out(after) for name in ("increase", "additive", "contrast") for size in sizes}
    controls = {name: [out(0.5)] * 2 for name in RANDOM} | {name: [out(rivals)] * 2 for name in NAMED}
    deep = [(Unit.ffn_neuron(9, number), 1.0), (Unit.attention_neuron(9, 0, number), 1.0)]
    return PromptRun(
        prompt=Prompt(relation, "x", " y", number, (1, 2), 0.5, 1),
        before=out(0.5),
        compared={name: out(compared.get(name, 0.5)) for name in SCORES},
        taken=taken,
        controls=controls,
        contrast=controls,
        queries={"queries": out(after), "random": out(0.5)},
        values=deep,
        query_units=[Unit.ffn_neuron(2, number)],
        shares={"attention": 3.0, "FFN": 1.0},
    )


def findings(runs: list[PromptRun]) -> dict[str, str]:
    overlap = {name: {"same": 0.3, "other": 0.1} for name in ("values", "queries")}
    return {claim.claim.split(":")[0][:40]: claim.finding for claim in claims(runs, 10, overlap, SCORES)}


def test_there_are_enough_prompts_and_none_begins_with_its_subject() -> None:
    rows = written()
    assert set(rows) == {"language", "capital", "country", "colour", "number", "month"}
    texts = [text for own in rows.values() for text, _ in own]
    assert len(texts) >= 60 and len(set(texts)) == len(texts)
    assert {text.split()[0] for text in texts} <= {"The", "Most", "A", "As", "If", "How", "In", "On", "Every"}
    for text, answer in (row for own in rows.values() for row in own):
        assert answer.startswith(" ") and answer.strip() not in text.replace("?", "").replace(",", "").split()


def test_intervals_cover_the_mean_and_repeat() -> None:
    made = interval([0.1, 0.2, 0.3, 0.4])
    assert made.low < made.mean < made.high and made.mean == pytest.approx(0.25)
    assert interval([0.1, 0.2, 0.3, 0.4]) == made
    assert interval([0.5] * 5).low == interval([0.5] * 5).high == 0.5
    assert difference([1.0, 2.0], [0.0, 1.0]).low == 1.0


def test_claims_hold_where_the_numbers_say_so() -> None:
    good = [prompt_run("capital", {"increase": 0.1, "additive": 0.1}, 0.001, 0.3, n) for n in range(6)]
    found = findings(good)
    assert found["Of the eight scores, log-probability inc"] == "reproduced"
    assert found["Random neurons do next to nothing."] == "reproduced"
    assert found["The units hold this very answer"] == "reproduced"
    assert found["Value units lie deep."] == "reproduced"
    assert found["Query neurons lie before the value units"] == "reproduced"


def test_claims_fail_where_the_numbers_say_so() -> None:
    bad = [prompt_run("capital", {"norm": 0.1}, 0.45, 0.001, n) for n in range(6)]
    found = findings(bad)
    assert found["Of the eight scores, log-probability inc"] == "not reproduced"
    assert found["The units hold this very answer"] == "not reproduced"
    assert found["A contrastive ranking, answer over the o"] == "not reproduced"
    assert found["A few hundred neurons hold the answer"] == "not reproduced"
    shallow = [replace(one, values=[(Unit.ffn_neuron(0, 1), 1.0)]) for one in bad]
    found = findings(shallow)
    assert found["Value units lie deep."] == "not reproduced"
    assert found["Query neurons lie before the value units"] == "not reproduced"


def test_the_claims_of_the_paris_case_can_fail() -> None:
    def account(attention: float, ffn: float) -> SimpleNamespace:
        return SimpleNamespace(account={"attn": attention, "mlp": ffn, "total": attention + ffn})

    assert paris._contrast(account(3, 1), " London", "attn").finding == "reproduced"  # type: ignore[arg-type]
    assert paris._contrast(account(1, 3), " London", "attn").finding == "not reproduced"  # type: ignore[arg-type]
    assert paris._activated({"L1N1": {" capital": 2.0, " of": 1.0}}).finding == "reproduced"
    assert paris._activated({"L1N1": {" capital": 1.0, " of": 2.0}}).finding == "not reproduced"
    assert paris._activated({}).finding == "not reproduced"


def rendered(made: Experiment) -> dict:
    document = json.loads(as_json(made))
    assert document["schema"] == f"mainstem/reproduce/{made.name}/1" and document["provenance"]["seed"] == 0
    text, page = as_text(made, 100), as_html(made)
    for claim in made.claims:
        assert claim.claim[:30] in text and claim.finding in page
    return document


@pytest.mark.slow
def test_the_paris_case_runs_on_the_default_model() -> None:
    document = rendered(paris.run(mainstem.open("demo"), quick=True))
    first = document["claims"][0]
    assert first["finding"] == "reproduced" and "L23H4@3" in first["measured"]


@pytest.mark.slow
def test_the_evaluation_runs_on_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mainstem.open("demo")
    kept, tried = known(model)
    assert len(kept) >= 60 and tried > len(kept)
    two = [next(one for one in kept if one.relation == relation) for relation in ("capital", "month")]
    monkeypatch.setattr(knowledge, "known", lambda model, most: (two, tried))
    document = rendered(knowledge.run(model, quick=True))
    assert len(document["tables"][0]["rows"]) == 12  # the model, eight published scores, three more
    taken = {row[0]: row[3] for row in document["tables"][1]["rows"]}
    assert all(lost["mean"] > 0.9 for name, lost in taken.items() if name.startswith("additive"))


def test_what_units_say_alone_is_found_exactly() -> None:
    """By brute force: every FFN neuron's vector through the readout, one at a time."""
    import torch
    import zoo

    from mainstem.analysis.alone import owners, ranks_alone, top_alone
    from mainstem.analysis.readout import frozen_scale, logits_of

    model = mainstem.open(zoo.build("llama"))
    made = model.trace(zoo.prompt(9, seed=1)[0].tolist()).decompose("units")
    readout, token = made.moment.anatomy.readout, 7
    scale = frozen_scale(readout, made.moment.stream)
    scores, ranks = {}, {}
    for group, entry in owners(made, {"ffn_neuron"}):
        for i, unit in enumerate(group.units):
            u = logits_of(readout, entry.vectors(group, torch.tensor([i])), scale)[0].double()
            scores[unit] = float(u.log_softmax(-1)[token])
            ranks[unit] = int((u > u[token]).sum()) + 1
    found = top_alone(made, token, {"ffn_neuron"}, 12)
    assert [part.unit for part in found] == sorted(scores, key=lambda unit: -scores[unit])[:12]
    assert [part.score for part in found] == pytest.approx([scores[part.unit] for part in found], abs=1e-5)
    shared = ranks_alone(made, torch.tensor([3, token]), {"ffn_neuron"})
    for (group, _), (up, down) in zip(owners(made, {"ffn_neuron"}), shared, strict=True):
        for i, unit in enumerate(group.units):
            own = up if float(group.coefficients[i]) > 0 else down
            assert int(own[i, 1]) == ranks[unit]
