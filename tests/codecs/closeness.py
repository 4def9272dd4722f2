"""How far a quantised value may be from the original: worked out here once more, in double precision."""

import math

import torch

from kvtier.chunk.tensors import TORCH_DTYPES

LEVELS = {"int8": (255, 127), "int4": (15, 15), "k5v4": (31, 15)}


def tensor_of(raw, spec):
    return torch.frombuffer(bytearray(raw), dtype=TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def matrices(tensor, axes):
    """[blocks, tokens, heads, channels], whatever the axes."""
    if axes == "LTHD":
        return tensor
    return (tensor.unsqueeze(2) if axes == "LTD" else tensor.flatten(0, 1).unsqueeze(2)).contiguous()


def cuts(length, group, unit):
    count = max(1, round(length / group)) if group else 1
    units = math.ceil(length / unit)
    return [
        (min(unit * (i * units // count), length), min(unit * ((i + 1) * units // count), length)) for i in range(count)
    ]


def allowed(codec, spec, original):
    """The greatest error per element: half a step and the rounding of the element type; 0 where nothing may change."""
    values = matrices(original.double(), spec.axes)
    bound = torch.zeros_like(values)
    plan = codec.plan(spec)
    if plan is None:
        return bound
    group = codec.options()["group"]
    rows = slice(plan.sinks, plan.tokens)
    if spec.name == "k":
        for first, stop in cuts(plan.rows, group if codec.name == "int4" else 0, 2):
            part = slice(plan.sinks + first, plan.sinks + stop)
            bound[:, part] = _half_step(codec, values[:, part], 1, key=True)
    else:
        for first, stop in cuts(plan.head, group, 1):
            part = slice(first, stop)
            bound[:, rows, :, part] = _half_step(codec, values[:, rows, :, part], 3, key=False)
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}[spec.dtype]
    smallest = 2.0**-24 if spec.dtype == "float16" else 2.0**-126  # where the grid is no finer
    largest = values.abs() + bound
    return torch.where(bound > 0, bound * (1 + 2.0**-20) + largest * rounding + smallest, bound)


def _half_step(codec, values, axis, *, key):
    if codec.name == "fp8":
        top = values.abs().amax(axis, keepdim=True)
        return torch.maximum(values.abs() * 2.0**-4, top / 448 * 2.0**-10).expand(values.shape)
    low, high = values.amin(axis, keepdim=True), values.amax(axis, keepdim=True)
    levels = LEVELS[codec.name][0 if key else 1]
    if codec.name == "int8" and not key:
        low, high = torch.zeros_like(low), values.abs().amax(axis, keepdim=True)
    return ((high - low) / levels / 2).clamp_min(2.0**-127).expand(values.shape)


def assert_within(codec, spec, original, decoded):
    """Finite numbers are within the bound, the others are what they were."""
    finite = torch.isfinite(original)
    assert torch.equal(torch.isfinite(decoded), finite), "finite in, finite out"
    before, after = matrices(original, spec.axes), matrices(decoded, spec.axes)
    odd = ~torch.isfinite(before)
    assert torch.equal(before[odd].view(torch.uint8), after[odd].view(torch.uint8)), (
        "NaN and infinity are kept as they are"
    )
    groups_kept = before.double().masked_fill(odd, math.nan)
    error = (after.double() - groups_kept).abs()
    bound = allowed(codec, spec, original)
    wrong = (error > bound) & ~odd & torch.isfinite(bound)
    assert not wrong.any(), f"off by {error[wrong].max():.3g}, {bound[wrong].max():.3g} are allowed"
