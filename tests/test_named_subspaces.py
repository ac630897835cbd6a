"""Named subspaces: probes that no memory can help, effects and readers that are planted, claims that can fail."""

import json

import pytest
import torch
import transformers
from test_cli import save_byte_tokenizer

import mainstem
from mainstem.analysis.probes import main_effects, train_probe
from mainstem.analysis.subspace import overlap, span
from mainstem.errors import UsageError
from mainstem.experiments import named_subspaces
from mainstem.experiments import named_subspaces_claims as case
from mainstem.experiments.named_readers import BYSTANDERS, READERS, chosen_neurons, shares
from mainstem.experiments.named_sentences import KINDS, SENTENCE, WORDS, sentences
from mainstem.lab.planted_subspaces import PlantedSubspaces
from mainstem.report import as_html, as_json, as_text
from mainstem.session import Model

TYPES, SEEN, WIDTH = 40, 28, 24


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- probes -------------------------------------------------------------------------------------------------

EMBEDDINGS = gaussian(TYPES, 10, seed=1)
TYPE = torch.cat([torch.arange(SEEN).repeat(8), torch.arange(SEEN, TYPES).repeat(8)])
TRAINING = 8 * SEEN


def unseen(vectors: torch.Tensor, embeddings: torch.Tensor = EMBEDDINGS) -> float:
    """The accuracy on types that no training row is about."""
    probe = train_probe(vectors[:TRAINING], TYPE[:TRAINING], embeddings)
    told = probe.told(vectors[TRAINING:], embeddings[SEEN:])
    return float((told == TYPE[TRAINING:] - SEEN).double().mean())


def test_a_probe_names_tokens_it_never_saw_where_their_embedding_is() -> None:
    noise = 0.3 * gaussian(len(TYPE), WIDTH, seed=2)
    assert unseen(noise + EMBEDDINGS[TYPE] @ gaussian(10, WIDTH, seed=3)) > 0.9
    assert unseen(noise) < 0.3


def test_what_can_only_be_learned_by_heart_is_not_told() -> None:
    """Each type has a code of its own, which says all about the type and nothing about its embedding."""
    vectors = gaussian(TYPES, 60, seed=4)[TYPE]
    probe = train_probe(vectors[:TRAINING], TYPE[:TRAINING], EMBEDDINGS)
    seen = probe.told(vectors[:TRAINING], EMBEDDINGS[:SEEN]) == TYPE[:TRAINING]
    assert float(seen.double().mean()) > 0.95 and unseen(vectors) < 0.35


def test_targets_drawn_for_each_type_are_not_told() -> None:
    vectors = EMBEDDINGS[TYPE] @ gaussian(10, WIDTH, seed=3)
    assert unseen(vectors, gaussian(TYPES, 10, seed=5)) < 0.35


def test_a_probe_needs_types() -> None:
    with pytest.raises(UsageError, match="six types"):
        train_probe(gaussian(20, 4, seed=1), torch.arange(20) % 5, gaussian(5, 3, seed=2))


def test_effects_of_an_additive_law_are_those_that_were_planted() -> None:
    first, second = torch.randint(5, (90,)), torch.randint(7, (90,))
    planted = gaussian(5, WIDTH, seed=6)
    found = main_effects(planted[first] + gaussian(7, WIDTH, seed=7)[second] + 3, [first, second])
    assert torch.allclose(found[0], planted - planted.mean(0), atol=1e-8) and found[1].shape == (7, WIDTH)
    none = main_effects(planted[first], [first, second])[1]
    assert float(none.abs().max()) < 1e-8


# --- readers ------------------------------------------------------------------------------------------------


def test_shares_of_random_rows_are_as_the_formula_says() -> None:
    found = span(gaussian(3, WIDTH, seed=8) * torch.tensor([[3.0], [2.0], [1.0]]))
    weights = found.sizes.square() / found.sizes.square().sum()
    measured = shares([gaussian(4000, WIDTH, seed=9)], found)
    spread = (2 * (WIDTH * float(weights.square().sum()) - 1) / (WIDTH + 2)) ** 0.5 / WIDTH
    assert abs(float(measured.mean()) - 1 / WIDTH) < 3 * spread / 4000**0.5
    assert float(measured.std()) == pytest.approx(spread, rel=0.1)
    assert torch.allclose(shares([found.directions], found), weights)
    assert float(shares([torch.zeros(2, WIDTH)], found).abs().max()) == 0


# --- claims -------------------------------------------------------------------------------------------------


def held(**changes: list[float]) -> case.Held:
    high, low = [0.9, 0.8, 1.0, 0.9], [0.1, 0.0, 0.1, 0.0]
    given = {"inside": high, "whole": high, "random": low, "drawn": low, "other": low, **changes}
    return case.Held("subject", 16, 20, **given)


def test_a_subspace_holds_a_word_only_above_every_control() -> None:
    high, low, wide = [0.9, 0.8, 1.0, 0.9], [0.1, 0.0, 0.1, 0.0], [1.0, 0.0, 1.0, 0.0]
    assert case.held_claim(held()).finding == "reproduced"
    for control in ("random", "drawn", "other"):
        assert case.held_claim(held(**{control: wide})).finding != "reproduced"
    assert case.held_claim(held(random=high)).finding == "in part"
    assert case.held_claim(held(inside=low)).finding == "in part"
    assert case.held_claim(held(inside=low, whole=low)).finding == "not reproduced"
    assert case.held_claim(held(drawn=high)).finding == "not reproduced"


def test_subspaces_that_share_are_not_disjoint() -> None:
    basis = torch.eye(40, dtype=torch.float64)
    spans = [span(basis[:12]), span(basis[12:24]), span(basis[6:18]), span(gaussian(12, 40, seed=3))]
    found = [case.apart_claim(overlap(spans[0], other, draws=200)).finding for other in spans[1:]]
    assert found == ["reproduced", "not reproduced", "in part"]


def changed(
    moved: float = 0.8, kept: float = 0.9, own: float = 0.9, other: float = 0.3, bystanders: float = 0.3
) -> dict[str, case.Changed]:
    """Interchanges by hand; numbers are of the interchange of the first kind's subspace."""

    def about(mean: float) -> list[float]:
        return [mean - 0.02, mean, mean + 0.02] * 4

    def one(name: str, source: float, base: float, groups: tuple[float, float, float]) -> case.Changed:
        told = {"a": (about(1 - source), about(source)), "b": (about(base), about(0.05))}
        made = dict(zip(("a", "b", BYSTANDERS), map(about, groups), strict=True))
        return case.Changed(name, told, made, made)

    made = [
        one("nothing", 0.05, 0.9, (0.0, 0.0, 0.0)),
        one("a", moved, kept, (own, other, bystanders)),
        *(one(f"random {i}", 0.05, 0.9, (0.2, 0.2, 0.2)) for i in (1, 2, 3)),
        one("everything", 0.9, 0.05, (1.0, 1.0, 1.0)),
    ]
    return {each.name: each for each in made}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "reproduced"),
        ({"kept": 0.5}, "in part"),
        ({"moved": 0.3}, "in part"),
        ({"moved": 0.05}, "not reproduced"),
    ],
)
def test_what_is_interchanged_must_move_alone(numbers: dict, expected: str) -> None:
    assert case.moved_claim("a", "b", changed(**numbers)).finding == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "reproduced"),
        ({"other": 0.6}, "in part"),
        ({"other": 0.5, "bystanders": 0.5}, "in part"),
        ({"other": 0.9}, "not reproduced"),
        ({"bystanders": 0.95}, "not reproduced"),
        ({"own": 0.2, "other": 0.1, "bystanders": 0.1}, "not reproduced"),
    ],
)
def test_readers_must_change_above_all_controls_and_alone(numbers: dict, expected: str) -> None:
    for readers in ("neurons", "heads"):
        assert case.readers_claim("a", "b", changed(**numbers), readers).finding == expected


# --- a tiny model -------------------------------------------------------------------------------------------


def tokenizer_of_words() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["?", "the", *SENTENCE.replace("{subject}", "").replace("{previous}", "").split()]
    words = list(dict.fromkeys([*words, *(word for kind in KINDS for word in WORDS[kind])]))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Model:
    """Six blocks of random weights, and a tokenizer of whole words."""
    tokenizer = tokenizer_of_words()
    directory = tmp_path_factory.mktemp("models") / "words"
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).eval().save_pretrained(directory)
    return mainstem.open(str(directory))


def test_test_sentences_have_no_word_of_the_training_sentences(tiny: Model) -> None:
    made = sentences(tiny, 100, 40)
    for kind in KINDS:
        column = made.ids[:, made.places[kind]]
        assert not set(column[:100].tolist()) & set(column[100:].tolist())
        assert len(made.types[kind][100:].unique()) == min(made.words[kind] // 3, 40)
    assert len(made.ids[:, -1].unique()) == 1 and made.places["previous token"] == made.ids.shape[1] - 2


def test_readers_are_those_with_planted_rows(tiny: Model) -> None:
    basis = torch.linalg.qr(gaussian(32, 32, seed=1)).Q
    spans = {"a": span(basis[:4]), "b": span(basis[4:8])}
    rows = dict(tiny.module.named_parameters())["model.layers.3.mlp.gate_proj.weight"]
    kept = rows.detach().clone()
    with torch.no_grad():
        rows[7] = 100 * basis[0]
    chosen, table = chosen_neurons(tiny, range(2, 4), spans)
    with torch.no_grad():
        rows.copy_(kept)
    assert str(chosen["a"][0]) == "L3N7" and list(chosen) == ["a", "b", BYSTANDERS]
    assert len({unit for group in chosen.values() for unit in group}) == 3 * READERS
    assert table.rows[0][2] > table.rows[0][3]


def test_the_experiment_runs_and_leaves_the_model_as_it_was(tiny: Model) -> None:
    ids = torch.tensor([[3, 4, 5]])
    before = tiny.module(ids).logits
    made, again = (named_subspaces.run(tiny, quick=True) for _ in range(2))
    assert torch.equal(tiny.module(ids).logits, before)
    assert json.loads(as_json(made))["claims"] == json.loads(as_json(again))["claims"] and len(made.claims) == 9
    by_name = {row[0]: row for row in made.tables[0].rows}
    assert by_name["nothing"][5:] == [0] * 6 and by_name["everything"][5:] == pytest.approx([1] * 6)
    assert "Heads that read, by weights" in as_text(made, 120) and "</html>" in as_html(made)


# --- planted subspaces --------------------------------------------------------------------------------------


def planted(apart: bool) -> dict[str, str]:
    """The finding of each claim."""
    tokenizer = tokenizer_of_words()
    model = mainstem.open(PlantedSubspaces(len(tokenizer), apart), tokenizer=tokenizer)
    made = named_subspaces.run(model, quick=True)
    return {claim.claim: claim.finding for claim in made.claims}


def test_every_claim_holds_where_the_two_subspaces_are_planted_apart() -> None:
    found = planted(apart=True)
    assert len(found) == 9 and set(found.values()) == {"reproduced"}


def test_claims_fail_where_both_are_written_into_one_subspace() -> None:
    found = planted(apart=False)
    assert found["The two lie in disjoint subspaces."] == "not reproduced"
    readers = [finding for claim, finding in found.items() if "that read it" in claim]
    moved = [finding for claim, finding in found.items() if "still the base's" in claim]
    assert len(readers) == 4 and "reproduced" not in {*readers, *moved}
    holding = {finding for claim, finding in found.items() if claim.startswith("A subspace holds")}
    assert holding == {"in part"}  # either is told, but not through its own directions alone


def test_a_tokenizer_without_the_words_is_refused(tmp_path) -> None:
    save_byte_tokenizer(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="single tokens"):
        named_subspaces.run(mainstem.open(str(tmp_path)))
