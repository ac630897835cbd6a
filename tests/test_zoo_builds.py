"""The tiny models themselves: nearly every family builds, and no model is degenerate."""

from collections.abc import Callable
from functools import partial

import handmade
import pytest
import torch
import transformers
import zoo
from zoo_sizes import UNBUILDABLE

transformers.logging.set_verbosity_error()

EVERY = 12
"""Of the families and of the variants, every twelfth is built in the quick tests."""


def _fault(model: torch.nn.Module, early: int = 1) -> str | None:
    """Why a model is a poor specimen, or None: its logits must be finite and hang on an early token."""
    ids = zoo.prompt()
    changed = ids.clone()
    changed[0, early] = 190 - ids[0, early]
    before, after = zoo.logits(model, ids).float(), zoo.logits(model, changed).float()
    if before.shape[:2] != ids.shape or before.dim() != 3:
        return f"logits of shape {tuple(before.shape)}"
    if not torch.isfinite(before).all():
        return "logits are not finite"
    effect = (after - before)[0, -1].norm() / before[0, -1].norm()
    return None if effect > 1e-3 else f"an early token moves the last logits by {effect:.1e} only"


def _survey(variants: list[tuple[str, str, dict]], early: int) -> tuple[dict[str, str], dict[str, str]]:
    """The poor specimens among them, and those that are not built, each with the reason."""
    faults, missing = {}, {}
    for name, family, overrides in variants:
        try:
            fault = _fault(zoo.build(family, **overrides), early)
        except zoo.NotBuilt as error:
            missing[name] = str(error)
            continue
        if fault is not None:
            faults[name] = fault
    return faults, missing


@pytest.mark.slow
def test_nearly_every_family_builds_and_is_a_good_specimen() -> None:
    """Families that later versions of Transformers add may fail to build; those of today may not be lost."""
    faults, missing = _survey([(family, family, {}) for family in zoo.families()], early=1)
    assert not faults
    assert len(zoo.families()) - len(missing) >= 147, missing


@pytest.mark.slow
def test_nearly_every_variant_builds_and_is_a_good_specimen() -> None:
    faults, missing = _survey(zoo.variants(), early=9)
    assert not faults
    assert len(missing) <= len(zoo.variants()) // 20, missing


@pytest.mark.slow
def test_a_few_families_and_variants_are_good_specimens() -> None:
    known = [(family, family, {}) for family in zoo.families() if family not in UNBUILDABLE]
    faults, missing = _survey(known[::EVERY] + zoo.variants()[::EVERY], early=9)
    assert not faults
    assert len(missing) <= 3, missing


@pytest.mark.parametrize("family", sorted(UNBUILDABLE))
def test_a_family_that_cannot_be_built_says_why(family: str) -> None:
    with pytest.raises(zoo.NotBuilt, match=family):
        zoo.build(family)


def test_a_model_that_would_be_huge_is_not_allocated() -> None:
    with pytest.raises(zoo.NotBuilt, match="parameters"):
        zoo.build("llama", vocab_size=2_000_000_000)


@pytest.mark.parametrize(
    "make",
    [partial(zoo.build, "llama"), partial(zoo.build, "mamba"), handmade.ALL["plain"]],
    ids=["llama", "mamba", "plain"],
)
def test_the_seed_alone_decides_the_weights(make: Callable[..., torch.nn.Module]) -> None:
    before = torch.get_rng_state()
    first, same, other = (list(make(seed=seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom", "mamba", "mixtral", "nanochat"])
def test_every_weight_is_away_from_its_start(family: str) -> None:
    """No gain of one, bias of zero or router bias of zero is left, so that a forgotten one would show."""
    for name, parameter in zoo.build(family).named_parameters():
        assert parameter.numel() == 1 or parameter.std() > 0.01, name


def test_variants_have_names_of_their_own() -> None:
    names = [name for name, _, _ in zoo.variants()]
    assert len(set(names)) == len(names) > 250


@pytest.mark.parametrize("name", handmade.ALL)
def test_handmade_models_are_good_specimens(name: str) -> None:
    model = handmade.ALL[name]()
    assert _fault(model) is None
    ids = zoo.prompt(batch=2)
    later = ids.clone()
    later[:, -1] = 190 - ids[:, -1]
    assert torch.equal(zoo.logits(model, ids)[:, :-1], zoo.logits(model, later)[:, :-1]), "it sees the future"
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    with torch.no_grad():
        logits = model(padded, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(logits, zoo.logits(model, ids), rtol=1e-4, atol=1e-5)
