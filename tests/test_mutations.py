"""No mistake is silent: every mutation of a right account is caught by a certificate, and a right account by none.

The quick part tries each mutation on a few of some varied models, the slow part on every family of the zoo.
"""

import json
from dataclasses import replace
from functools import cache

import jaxtyping
import mutations_names  # noqa: F401  (fills MUTATIONS)
import mutations_stream  # noqa: F401
import pytest
import transformers
import zoo
import zoo_table
from mutants import MUTATIONS, Mutant, Subject, caught_by, cores_of, failures, subject, swapped, unexplained
from mutations import neurons_called_by_their_neighbour, sources_called_by_their_neighbour
from zoo_sizes import UNBUILDABLE

transformers.logging.set_verbosity_error()

SPECIMENS = [
    *("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "deepseek_v3", "qwen2_moe", "granite", "gpt_oss"),
    *("channel_gates", "mixed_back", "softcap", "einsum_sinks", "openai-gpt", "doge"),
    *("afmoe", "biogpt", "phi", "gpt_neox_japanese"),
]
EACH = 1
"""On how many of them a mutation is tried in the quick part."""


@cache
def known(name: str) -> Subject:
    return subject(name)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str) -> None:
    tried = 0
    start = list(MUTATIONS).index(name) % len(SPECIMENS)
    for model in SPECIMENS[start:] + SPECIMENS[:start]:
        mutant = MUTATIONS[name](known(model))
        if mutant is not None:
            assert caught_by(known(model), mutant) is not None, model
            tried += 1
        if tried == EACH:
            break
    assert tried


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 4 == 0 else pytest.mark.slow) for i, name in enumerate(SPECIMENS)]
)
def test_the_truth_is_not_caught(name: str) -> None:
    assert list(failures(known(name), Mutant(known(name).anatomy))) == []


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mutate", [sources_called_by_their_neighbour, neurons_called_by_their_neighbour])
def test_names_that_are_wrong_everywhere_are_caught_whatever_the_seed(mutate, seed: int) -> None:
    """Labels are samples; of a mistake that is everywhere the default sample is enough."""
    mutant = mutate(known("llama"))
    assert mutant is not None
    assert (caught_by(known("llama"), mutant, seed=seed) or "").startswith("labels")


@pytest.mark.slow
def test_two_sources_exchanged_in_one_layer_are_caught_by_a_larger_sample() -> None:
    """Pattern and values exchanged together in one attention of three: sums are blind to it."""
    s = known("gpt_neox")
    site = cores_of(s.anatomy)[1].site
    order = swapped(s.ids.shape[1], 0, 5)

    def change(m):
        heads = m.attention[site]
        wrong = replace(heads, value=heads.value[:, order], pattern=heads.pattern[:, order])
        return replace(m, attention={**m.attention, site: wrong})

    assert (caught_by(s, Mutant(s.anatomy, change, "labels"), per_level=60) or "").startswith("labels: L1H")


def test_nearly_every_family_is_exact_at_every_level() -> None:
    """By what `make zoo` found; the test below compares it with what is found now."""
    kept = json.loads(zoo_table.EXPECTED.read_text())
    found = zoo_table.totals(kept["families"])
    assert {level: dict(count) for level, count in found.items()} == kept["totals"]
    least = {"sublayers": 180, "heads": 170, "subvalues": 170, "attention_neurons": 170, "neurons": 175}
    assert all(found[level]["exact"] >= number for level, number in least.items())
    assert not any(count["FAILED"] for count in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in zoo.families() if family not in UNBUILDABLE])
def test_every_family_is_exact_or_refused_and_every_mutation_caught(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # axes are checked by the quick tests
    try:
        row, s = zoo_table.examine(family)
    except zoo.NotBuilt as error:
        pytest.skip(str(error))
    assert "FAILED" not in row.levels.values(), row.reasons
    assert zoo_table.expected().get(family, row.levels) == row.levels, "see `python -m tests.zoo_table --json`"
    assert ("refused" in row.levels.values()) == bool(row.reasons)
    if s is None:
        return
    assert unexplained(s.moment) is None
    silent = []
    for name, mutate in MUTATIONS.items():
        mutant = mutate(s)
        # one label of each kind is nearly always enough, and costs less than the three of the default
        if mutant is not None and not (caught_by(s, mutant, per_level=1) or caught_by(s, mutant)):
            silent.append(name)
    assert silent == []
