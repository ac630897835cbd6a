"""The readout: from the stream value before the final norm to the logits, as a formula fitted to its behaviour."""

import torch
from torch import Tensor

from mainstem.model.anatomy import Projection, Readout
from mainstem.model.behaviour import affine
from mainstem.model.norms import PROBE, Norm, constants_of, fit_norm
from mainstem.model.paths import linear_map
from mainstem.model.program import extract, probe_dtype
from mainstem.model.recording import Value
from mainstem.model.sites import SiteFinder
from mainstem.model.stream import is_weight_product


def find_readout(root: Value, head_input: Value, product: Value, logits: Value, finder: SiteFinder, n: int) -> Readout:
    """The readout between `root` and `logits`; `product` is the product of `head_input` with the unembedding."""
    head = linear_map(product, head_input)
    unembedding, own = head if head is not None else (None, None)
    reason = None if unembedding is not None else "the unembedding is no matrix that can be read"
    norm, before, why = _before_head(root, head_input)
    scale, bias, softcap, after = _after_head(own, product, logits)
    reason = reason or why or after
    program = extract(logits, [root]) if reason else None
    return Readout(
        norm=norm,
        unembedding=unembedding if unembedding is not None else torch.empty(0, head_input.shape[-1]),
        bias=bias,
        scale=scale,
        softcap=softcap,
        input_site=finder.site(head_input),
        stream_site=finder.site(root),
        recorded_positions=n,
        before=before,
        opaque=reason,
        program=program,
        program_shape=root.shape,
    )


def _before_head(root: Value, head_input: Value) -> tuple[Norm | None, Projection | None, str | None]:
    """The norm between the stream and the head, and a projection after it where the widths differ."""
    before: list[Tensor] = []
    value = head_input
    for _ in range(4):
        if value is root:
            return None, _projection(before), None
        program = extract(value, [root])
        if program is None:
            break
        if value.tensor.numel() == root.tensor.numel():
            norm = fit_norm(program, root.tensor, value.tensor, *constants_of(program))
            if norm is not None:
                return norm, _projection(before), None
            form = affine(program, [root.tensor], root.shape[-1])
            if form is not None and not form.constant.any():
                return None, _projection([*before, form.factors[0][0]]), None
        call = value.call
        if call is None or not is_weight_product(call) or len(call.active_operands()) != 1:
            break
        source = call.active_operands()[0]
        found = linear_map(value, source)
        if found is None or found[1] is not None:
            break
        before.append(found[0])
        value = source
    return None, None, "between the stream and the unembedding lies more than a norm and a projection"


def _projection(matrices: list[Tensor]) -> Projection | None:
    return Projection(tuple(reversed(matrices))) if matrices else None


def _after_head(own: Tensor | None, product: Value, logits: Value):
    """(scale, bias [d_vocab], softcap, reason): how the product with the unembedding becomes the logits."""
    width = product.shape[-1]
    own = torch.zeros(width, dtype=torch.float64, device=product.tensor.device) if own is None else own.double()
    scale, softcap, offset = 1.0, None, torch.zeros_like(own)
    if logits is not product:
        program = extract(logits, [product])
        if program is None or logits.tensor.numel() != product.tensor.numel():
            return 1.0, None, None, "the logits are not an elementwise function of the unembedding's product"
        form = affine(program, [product.tensor], width)
        if form is not None and _constant(form.factors[0]):
            scale, offset = float(form.factors[0].flatten()[0]), form.constant[0]
        else:
            fitted = _fit_softcap(program, product)
            if fitted is None:
                return 1.0, None, None, "the logits pass through a non-linearity that is no softcap"
            scale, softcap = fitted
    bias = own * scale + offset
    return scale, bias if bias.any() else None, softcap, None


def _constant(factor: Tensor) -> bool:
    return torch.allclose(factor, factor.flatten()[0].expand_as(factor), rtol=1e-5, atol=0)


def _fit_softcap(program, product: Value) -> tuple[float, float] | None:
    """(scale, cap) of cap * tanh(scale * u / cap)."""
    like = product.tensor
    dtype = probe_dtype(like.dtype)
    cap = float(program(torch.full_like(like, 1e6, dtype=dtype)).flatten()[0])
    tiny = torch.full_like(like, cap * 1e-3, dtype=dtype)
    if not cap > 0:
        return None
    scale = float(torch.atanh(program(tiny).double().flatten()[0] / cap) / 1e-3)
    probe = (torch.linspace(-3, 3, like.numel()) * cap / max(scale, 1e-9)).to(tiny).reshape(like.shape)
    expected = cap * torch.tanh(scale * probe.double() / cap)
    seen = program(probe).double()
    fits = (seen - expected).abs().max() <= 100 * PROBE * cap
    return (scale if abs(scale - 1) > 1e-4 else 1.0, cap) if bool(fits) else None
