"""Losses that use autograd: penalties on gradients, transforms, checkpoints, functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import (
    ALONE,
    B,
    Case,
    Spec,
    normal,
    of_function,
    of_module,
    own_parameters,
    registry,
)

CASES: dict[str, Spec] = {}
case = registry(CASES)

W = {"w": (4, 5), "v": (4,)}
# A gradient of the loss's own is taken of tensors that no rule has detached.
NO_RULES: dict[str, Any] = {"caution": 2, "beyond_vmap": True}


def _score(p: Any, x: Tensor) -> Tensor:
    return F.linear(x, p["w"]).tanh() @ p["v"]


def _net(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.SiLU(), nn.Flatten(), nn.Linear(9, 1)
    ).to(dtype)


# -- torch.autograd.grad --------------------------------------------------------------------------


def _input_penalty(p: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    score = _score(p, x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score + (gradient.norm(dim=1) - 1).square()


def _interpolated_penalty(p: Any, x: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """The penalty of WGAN-GP, as it is written everywhere."""
    mixed = (share[:, None] * x + (1 - share[:, None]) * fake).requires_grad_(True)
    score = _score(p, mixed)
    (gradient,) = torch.autograd.grad(
        outputs=score,
        inputs=mixed,
        grad_outputs=torch.ones_like(score),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )
    gap = _score(p, fake) - _score(p, x)
    return gap + 10 * (gradient.view(len(x), -1).norm(2, dim=1) - 1) ** 2


def _first_order(p: Any, x: Tensor) -> Tensor:
    """Forces as minus the gradient of an energy, without a second derivative."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(_score(p, x).sum(), x)
    return _score(p, x) * (1 + gradient.square().sum(1))


def _adversarial(p: Any, x: Tensor) -> Tensor:
    delta = torch.zeros_like(x, requires_grad=True)
    (gradient,) = torch.autograd.grad(_score(p, x + delta).square().sum(), delta)
    return _score(p, x + 0.1 * gradient.sign())


def _forces(p: Any, x: Tensor, target: Tensor) -> Tensor:
    x.requires_grad = True
    energy = _score(p, x)
    forces = -torch.autograd.grad([energy], [x], [torch.ones_like(energy)], create_graph=True)[0]
    return (forces - target).square().sum(1) + energy


def _twice(p: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(_score(p, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum(1)


def _inner_step(p: Any, x: Tensor) -> Tensor:
    """One step on the parameters themselves, differentiated through, as MAML does."""
    loss = _score(p, x).square().mean()
    (gradient,) = torch.autograd.grad(loss, p["w"], create_graph=True)
    return _score({"w": p["w"] - 0.1 * gradient, "v": p["v"]}, x)


def _parameter_penalty(p: Any, x: Tensor) -> Tensor:
    score = _score(p, x)
    found = torch.autograd.grad(score.sum(), (p["w"], p["v"]), create_graph=True)
    return score + sum(g.square().sum() for g in found)


def _unused_input(p: Any, x: Tensor) -> Tensor:
    x, y = x.detach().requires_grad_(), x.detach().requires_grad_()
    found = torch.autograd.grad(_score(p, x).sum(), (x, y), create_graph=True, allow_unused=True)
    assert found[1] is None
    return found[0].square().sum(1)


def _of_hidden(p: Any, x: Tensor) -> Tensor:
    hidden = F.linear(x, p["w"])
    (gradient,) = torch.autograd.grad((hidden.tanh() @ p["v"]).sum(), hidden, create_graph=True)
    return gradient.square().sum(1) + hidden.sum(1)


def _line(loss: Tensor) -> Tensor:
    return loss.reshape(len(loss))


CASES |= {
    name: of_function(of, W, *inputs, loss=_line, **{**NO_RULES, **known})
    for name, of, inputs, known in (
        ("gradient-penalty", _input_penalty, ((5,),), {}),
        ("gradient-penalty-between-two", _interpolated_penalty, ((5,), (5,), ()), {}),
        ("gradient-without-a-graph", _first_order, ((5,),), {}),
        ("adversarial-step", _adversarial, ((5,),), {}),
        ("forces", _forces, ((5,), (5,)), {}),
        ("gradient-of-a-gradient", _twice, ((5,),), {}),
        ("step-on-the-parameters", _inner_step, ((5,),), {"mixes": True}),
        ("penalty-on-the-gradient-of-the-parameters", _parameter_penalty, ((5,),), {"mixes": True}),
        ("gradient-of-what-is-unused", _unused_input, ((5,),), {}),
        ("gradient-of-what-is-hidden", _of_hidden, ((5,),), {}),
    )
}


@case(**NO_RULES)
def gradient_penalty_of_a_network(dtype):
    net = _net(dtype)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = torch.func.functional_call(net, p, (x,))
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score[:, 0] + gradient.flatten(1).square().sum(1)

    params = {name: p.detach() for name, p in net.named_parameters()}
    return Case(params, loss_fn, torch.randn(B, 2, 5, dtype=dtype))


@case(**NO_RULES)
def gradient_penalty_by_own_parameters(dtype):
    net = _net(dtype)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        del p
        x = x.detach().requires_grad_()
        score = net(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score[:, 0] + gradient.flatten(1).square().sum(1)

    return Case(own_parameters(net), loss_fn, torch.randn(B, 2, 5, dtype=dtype))


# -- torch.func -----------------------------------------------------------------------------------


def _func_grad(p: Any, x: Tensor) -> Tensor:
    def of(x: Tensor) -> Tensor:
        return _score(p, x).sum()

    return torch.func.grad(of)(x).square().sum(1)


def _func_grad_and_value(p: Any, x: Tensor) -> Tensor:
    gradient, value = torch.func.grad_and_value(lambda x: _score(p, x).sum())(x)
    return value + gradient.square().sum(1)


def _func_grad_of_parameters(p: Any, x: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda w: _score({**p, "w": w}, x).square().sum())(p["w"])
    return _score({**p, "w": p["w"] - 0.1 * gradient}, x)


def _func_grad_of_all_parameters(p: Any, x: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda q: _score(q, x).square().sum())(p)
    return _score({name: p[name] - 0.1 * gradient[name] for name in p}, x)


def _func_jvp(p: Any, x: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(lambda x: _score(p, x), (x,), (x.cos(),))
    return value + tangent.square()


def _func_jvp_of_parameters(p: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda w: _score({**p, "w": w}, x), (p["w"],), (p["w"].sin(),))[1]


def _func_vmap(p: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: _score(p, row))(x)


def _func_vmap_over_views(p: Any, x: Tensor) -> Tensor:
    """Several views of an example at once."""
    views = torch.stack([x, -x, x.flip(1)])
    return torch.func.vmap(lambda x: _score(p, x))(views).square().sum(0)


def _func_jacobian(p: Any, x: Tensor) -> Tensor:
    jacobian = torch.func.jacrev(lambda x: F.linear(x, p["w"]).tanh() * p["v"])(x[0])
    return jacobian.square().sum()[None]


def _func_forward_jacobian(p: Any, x: Tensor) -> Tensor:
    jacobian = torch.func.jacfwd(lambda x: F.linear(x, p["w"]).tanh() * p["v"])(x[0])
    return jacobian.square().sum()[None]


def _func_hessian(p: Any, x: Tensor) -> Tensor:
    """The Laplacian of an energy, as physics-informed networks need it."""
    hessian = torch.func.hessian(lambda x: _score(p, x).sum())(x[0])
    return hessian.diagonal().sum()[None]


def _func_vjp(p: Any, x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(lambda x: F.linear(x, p["w"]).tanh(), x)
    return value.sum(1) + pull(p["v"].expand_as(value))[0].square().sum(1)


def _func_grad_within_vmap(p: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: _score(p, row)))(x).square().sum(1)


CASES |= {
    name: of_function(of, W, (5,), loss=_line, **{"beyond_vmap": True, **known})
    for name, of, known in (
        ("func-grad", _func_grad, {}),
        ("func-grad-and-value", _func_grad_and_value, {"mixes": True}),
        ("func-grad-of-parameters", _func_grad_of_parameters, {"mixes": True, **ALONE}),
        ("func-grad-of-all-parameters", _func_grad_of_all_parameters, {"mixes": True, **ALONE}),
        ("func-jvp", _func_jvp, {}),
        ("func-jvp-of-parameters", _func_jvp_of_parameters, {}),
        ("func-vmap", _func_vmap, {}),
        ("func-vmap-over-views", _func_vmap_over_views, {}),
        ("func-jacrev", _func_jacobian, {"mixes": True}),
        ("func-jacfwd", _func_forward_jacobian, {"mixes": True}),
        ("func-hessian", _func_hessian, {"mixes": True}),
        ("func-vjp", _func_vjp, {}),
        ("func-grad-within-vmap", _func_grad_within_vmap, {}),
    )
}

# -- parts without a gradient, and graphs that are cut --------------------------------------------


def _teacher(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = _score({"w": p["w"] * 2, "v": p["v"]}, x)
    return (_score(p, x) - target).square()


def _inference(p: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = float(x.shape[1])
    return _score(p, x) * scale


def _fixed_point(p: Any, x: Tensor) -> Tensor:
    """A deep equilibrium: iterate without a graph, then one step with it."""
    step = lambda z: (F.linear(x, p["w"]) + 0.1 * z * p["v"]).tanh()  # noqa: E731
    with torch.no_grad():
        z = torch.zeros(len(x), 4, dtype=x.dtype)
        for _ in range(5):
            z = step(z)
    return step(z).sum(1)


def _enabled_again(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        with torch.enable_grad():
            score = _score(p, x)
        other = score * 2
    return score + other


def _frozen_for_a_while(p: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        hidden = F.linear(x, p["w"])
    return hidden.sum(1) + _score(p, x)


CASES |= {
    name: of_function(of, W, (5,), loss=_line)
    for name, of in (
        ("teacher-without-gradients", _teacher),
        ("inference-mode-inside", _inference),
        ("fixed-point", _fixed_point),
        ("gradients-enabled-again", _enabled_again),
        ("frozen-for-a-while", _frozen_for_a_while),
    )
}

# -- what is refused, or runs alone ---------------------------------------------------------------


def _backward(p: Any, x: Tensor) -> Tensor:
    _score(p, x).sum().backward()
    return _score(p, x)


def _hook(p: Any, x: Tensor) -> Tensor:
    hidden = F.linear(x, p["w"])
    hidden.register_hook(lambda dy: 2 * dy)
    return hidden.tanh() @ p["v"]


def _hook_on_a_parameter(p: Any, x: Tensor) -> Tensor:
    w = p["w"] * 1
    w.register_hook(lambda dy: 2 * dy)
    return _score({**p, "w": w}, x)


CASES |= {
    name: of_function(of, W, (5,), loss=_line, refused=refused)
    for name, of, refused in (
        ("calls-backward", _backward, "adds raw gradients up"),
        ("registers-a-hook", _hook, "hooks on gradients are not run"),
        ("registers-a-hook-on-a-derived-parameter", _hook_on_a_parameter, "hooks on gradients"),
    )
}


def _hooked(register: Callable[[nn.Module], Any]) -> Callable[[torch.dtype], Case]:
    def make(dtype: torch.dtype) -> Case:
        net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        register(net[2])
        return of_module(net, torch.randn(B, 5), dtype=dtype, own=True)

    return make


CASES |= {
    "full-backward-hook": Spec(
        _hooked(lambda layer: layer.register_full_backward_hook(lambda m, a, b: (2 * a[0],))),
        refused="has a backward hook",
    ),
    "full-backward-pre-hook": Spec(
        _hooked(lambda layer: layer.register_full_backward_pre_hook(lambda m, dy: (2 * dy[0],))),
        refused="has a backward hook",
    ),
    "forward-hook": Spec(_hooked(lambda layer: layer.register_forward_hook(lambda m, a, y: 2 * y))),
    "forward-pre-hook": Spec(
        _hooked(lambda layer: layer.register_forward_pre_hook(lambda m, a: (a[0].sin(),)))
    ),
    "parameter-hook": Spec(
        _hooked(lambda layer: layer.weight.register_hook(lambda dy: 2 * dy)), refused="hook"
    ),
}


@case(unused=True)
def detached_target(dtype):
    params = normal(dtype, online=(4, 5), target=(4, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        online, target = F.linear(x, p["online"]), F.linear(-x, p["target"]).detach()
        return -F.cosine_similarity(online, target)

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))
