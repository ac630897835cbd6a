"""The claims of induction in the wild: each can come out either way, on numbers made by hand."""

from dataclasses import replace

from mainstem.experiments import induction_claims as claims
from mainstem.results.heads import AblationRow, Control, InContext

CONTROL = Control([["L1H0"], ["L1H1"]], [0.1, 0.2], [0.0, 0.0])
TAKEN = AblationRow("prefix", ["L1H2"], "mean", 3.0, 0.1, CONTROL, 20.0)
LEARNING = InContext(-0.4, -0.6, -0.2, 26, 258, 264, 78, -0.1)
COMPOSED = claims.Composed(
    [("L1H2", "L0H1")], [[0.2, 40.0, 0.01]], 40.0, [float(i % 5) for i in range(100)], 0.04, 0.01
)
CONTINUED = claims.Continued("The Potters ... Pot", "ters", 0.97, 0.5, 0.6, [0.96, 0.97])


def test_ten_times_more_than_random_heads():
    assert claims.taken_out([TAKEN]).finding == "reproduced"
    assert claims.taken_out([replace(TAKEN, ratio=6.0)]).finding == "in part"
    assert claims.taken_out([replace(TAKEN, repeated=0.15)]).finding == "not reproduced"
    assert claims.taken_out([TAKEN, replace(TAKEN, method="zero", repeated=0.1)]).finding == "not reproduced"
    assert claims.taken_out([]).finding == "not reproduced"


def test_in_context_learning():
    assert claims.in_context(LEARNING).finding == "reproduced"
    assert claims.in_context(replace(LEARNING, high=0.1)).finding == "in part"
    assert claims.in_context(replace(LEARNING, mean=0.1, high=0.3)).finding == "not reproduced"
    assert claims.in_context(None).finding == "not reproduced"


def test_in_context_learning_without_the_heads():
    assert claims.learning_without(LEARNING).finding == "reproduced"
    assert claims.learning_without(replace(LEARNING, without=-0.3)).finding == "in part"
    assert claims.learning_without(replace(LEARNING, without=-0.5)).finding == "not reproduced"


def test_composition_against_other_writers():
    assert claims.composition(COMPOSED).finding == "reproduced" and COMPOSED.p == 1 / 101
    assert claims.composition(replace(COMPOSED, mean=2.0)).finding == "in part"
    alike = replace(COMPOSED, mean=2.0, numbers=[[0.05, 2.0, 0.9]])
    assert claims.composition(alike).finding == "not reproduced"
    assert claims.composition("no queries").finding == "measured"


def test_the_example():
    assert claims.continuation(CONTINUED).finding == "reproduced"
    assert claims.continuation(replace(CONTINUED, without=0.95)).finding == "in part"
    assert claims.continuation(replace(CONTINUED, random=[0.5])).finding == "in part"
    assert claims.continuation(replace(CONTINUED, other=0.96)).finding == "not reproduced"


def test_previous_token_heads():
    assert claims.feeding([replace(TAKEN, behaviour="previous")]).finding == "reproduced"
    assert claims.feeding([replace(TAKEN, behaviour="previous", repeated=0.1)]).finding == "not reproduced"
    assert claims.feeding([TAKEN]).finding == "measured"
