"""KDA's kernels with the softplus gate, which has no floor, against the fp64 recurrence (kernels.md §1, fault K-14)."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import relative_error
from tercet.ops import fused_kda, kda_gate, l2_norm, use_tier
from tercet.ops.kda import fused_kda_export, reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's own 0·x and x/0 of masked lanes

NAMES = ("o", "final", "q", "k", "v", "z", "b", "A_log", "dt_bias", "state")
LIMITS = dict(zip(NAMES, (5e-3, 2e-3, 8e-3, 8e-3, 8e-3, 1e-2, 1e-2, 2e-2, 2e-2, 5e-3)))
LENGTHS = (21, 0, 1)


def draw(lengths=LENGTHS, heads=2, width=16):
    rows = [torch.randn(1, sum(lengths), heads, width) for _ in "qkvz"]
    rows.append(torch.randn(1, sum(lengths), heads))
    return [*rows, 0.3 * torch.randn(heads), torch.randn(heads, width), torch.randn(len(lengths), heads, width, width)]


def bounds(lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def kernel(inputs, lengths):
    with use_tier("triton"):
        return fused_kda(*inputs[:7], state=inputs[7], cu_seqlens=bounds(lengths), lower_bound=None)


def formula(inputs, lengths):
    q, k, v, z, b, A_log, dt_bias, state = inputs
    g = kda_gate(z, A_log, dt_bias, lower_bound=None)
    unit = l2_norm(q), l2_norm(k)
    scale = q.shape[-1] ** -0.5
    return reference.kda(*unit, v, g, b.sigmoid(), scale=scale, state=state, cu_seqlens=bounds(lengths))


def gradients(run, inputs, lengths):
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, final = run(leaves, lengths)
    generator = torch.Generator().manual_seed(1)
    pulls = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, final)]
    return o.detach(), final.detach(), *torch.autograd.grad((o, final), leaves, pulls)


def compare(inputs, lengths, **limits):
    ours = gradients(kernel, inputs, lengths)
    exact = gradients(formula, [x.double() for x in inputs], lengths)
    for name, a, e in zip(NAMES, ours, exact):
        assert a.isfinite().all(), name
        assert relative_error(a, e) < {**LIMITS, **limits}[name], name
    return ours


@pytest.mark.parametrize("lengths", [(1,), (17,), (3, 0, 33)])
def test_forward_and_all_gradients(lengths):
    compare(draw(lengths), lengths)


@pytest.mark.parametrize("logit", [-20.0, 30.0, 1000.0, 1e5])
def test_gates_at_both_ends(logit):
    """From no decay at all, through e^−30, to gates of −1000 and −1e5, after which only the newest token is left."""
    inputs = draw()
    inputs[3] = torch.full_like(inputs[3], logit)
    ours = compare(inputs, LENGTHS)
    if logit >= 1000:
        assert not ours[NAMES.index("z")].any()  # exp(−1000) times anything


@pytest.mark.parametrize("axis", [1, 3])
def test_neighbours_that_keep_and_forget(axis):
    """A gate of −900 beside one near zero, in time and across channels: no sum may lose the small one."""
    inputs = draw()
    z = inputs[3]
    odd = torch.arange(z.shape[axis]).view(-1, *[1] * (3 - axis)) % 2 == 1
    inputs[3] = torch.where(odd, 900.0, -12.0).expand(z.shape).clone()
    compare(inputs, LENGTHS)


def test_logits_over_four_orders():
    inputs = draw()
    inputs[3] *= 10 ** (4 * torch.rand(inputs[3].shape) - 1)
    compare(inputs, LENGTHS)


def test_tiny_gates_are_not_rounded_away():
    """softplus(−16.5) is 6.8e-8, half a unit of 1 + x in fp32: a long memory must not decay by 0 or by twice that."""
    tokens = 64
    inputs = draw((tokens,), heads=1)
    inputs[3] = torch.full_like(inputs[3], -16.5)
    inputs[4] -= 1e4  # write nothing, so that the state only decays
    inputs[5], inputs[6] = torch.full((1,), 6.0), torch.zeros(1, 16)
    lost = 1 - kernel(inputs, (tokens,))[1].double() / inputs[7].double()
    exact = -torch.expm1(-tokens * torch.tensor(6.0).double().exp() * torch.log1p(torch.tensor(-16.5).double().exp()))
    assert (lost / exact - 1).abs().max() < 2e-3


def test_identical_keys_full_writes_slow_decay():
    inputs = draw((48,), heads=1)
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).clone()
    inputs[3] = torch.full_like(inputs[3], -9.0)
    inputs[4] = torch.full_like(inputs[4], 20.0)
    o, final = kernel(inputs, (48,))
    o_exact, final_exact = formula([x.double() for x in inputs], (48,))
    assert relative_error(o, o_exact) < 5e-3
    assert relative_error(final, final_exact) < 2e-3


def test_half_precision_rows():
    inputs = draw((20,))
    rounded = [x.half() if n < 5 else x for n, x in enumerate(inputs)]
    o, final = kernel(rounded, (20,))
    o_exact, final_exact = formula([x.double() for x in rounded], (20,))
    assert o.dtype is torch.float16
    assert relative_error(o, o_exact) < 5e-3
    assert relative_error(final, final_exact) < 2e-3


def test_nan_stays_in_its_sequence():
    lengths = (5, 17, 3)
    inputs = draw(lengths)
    clean_o, clean_final = kernel(inputs, lengths)
    inputs[3][0, 8, 1, 3] = float("nan")
    o, final = kernel(inputs, lengths)
    for rows, n in ((slice(0, 5), 0), (slice(22, 25), 2)):
        assert torch.equal(o[:, rows], clean_o[:, rows])
        assert torch.equal(final[n], clean_final[n])
    assert o[0, 8:22, 1].isnan().all()


def test_exported_states():
    inputs = draw((40,))
    settings = {"exports": [(0, 32), (0, 16)], "lower_bound": None, "state": inputs[7], "cu_seqlens": bounds((40,))}
    inputs[7] = settings["state"] = inputs[7][:1]
    with use_tier("triton"):
        _, _, states = fused_kda_export(*inputs[:7], **settings)
    with use_tier("torch"):
        _, _, exact = fused_kda_export(*(x.double() for x in inputs[:7]), **settings)
    assert relative_error(states, exact) < 2e-3
