"""From edits as text to edits of one model: files are read, texts become runs, differences of texts become vectors.

The difference of two texts as a vector to add is that of activation addition (Turner et al. 2023, "Steering Language
Models With Activation Engineering") and contrastive activation addition (Rimsky et al. 2024): what is at the point at
the last token of the one minus the same of the other. The texts may have different lengths.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from mainstem.causal.edit_values import point_values
from mainstem.causal.edits import Edit
from mainstem.causal.reference import LONGEST, reference_text
from mainstem.errors import EditError
from mainstem.intervene.edit_text import EditText, parse_edit
from mainstem.model.directions import read_direction
from mainstem.points import Point
from mainstem.run.inputs import context_length

if TYPE_CHECKING:
    from mainstem.session import Model

VECTORS = ("write", "resid_pre", "resid_mid", "resid_post", "resid_final")
"""Kinds of points at which a difference of two texts is a vector of what is written or held there."""


def edit_of(model: "Model", written: str) -> Edit:
    """The edit that a text describes; see `mainstem.intervene.edit_text` for how to write one.

    Raises:
        EditError, UnitError: if it is no edit, or the model has no such point.
        TargetError: if a file holds no vector.
        PromptError: if a text cannot be run.
    """
    told = parse_edit(written)
    make = {
        "zero": Edit.zero, "scale": Edit.scale, "mean": Edit.mean, "resample": Edit.resample, "patch": Edit.patch,
        "freeze": Edit.freeze, "knockout": Edit.knockout, "add": Edit.add, "project_out": Edit.project_out,
    }[told.method]  # fmt: skip
    options: dict[str, Any] = {"positions": told.positions}
    if told.method == "resample":
        options["seed"] = model.seed
    made = make(told.at, *_arguments(model, told), **options)
    return replace(made, written=written.strip())


def _arguments(model: "Model", told: EditText) -> tuple:
    """What the method is given beside point and positions."""
    if told.method == "scale":
        return (told.number,)
    if told.method == "knockout":
        return (told.sources,)
    if told.method == "add":
        return (_vector(model, told), told.number)
    if told.method == "project_out":
        return (_vector(model, told)[None],)
    if told.method == "mean" and not told.texts:
        longest = min(LONGEST, context_length(model.module) or LONGEST)
        return (model.encode(reference_text())[:longest],)
    return told.texts


def _vector(model: "Model", told: EditText) -> Float[Tensor, " entry"]:
    if told.file is not None:
        return read_direction(told.file).detach().squeeze()
    plus, minus = (_at_last(model, told.at, text) for text in told.texts)
    return plus - minus


def _at_last(model: "Model", at: Point, text: str) -> Float[Tensor, " entry"]:
    """What is at a point at the last token of a text."""
    if at.kind not in VECTORS:
        raise EditError(f"Two texts have no difference at {at}", None, "Take the stream (L12.resid_pre) or a unit.")
    return point_values(model.module, model.anatomy, at, model.inputs(text))[0][-1]
