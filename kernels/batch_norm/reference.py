"""Batch norm of one model with its gamma/sigma penalty, plain torch.

N samples, C channels, R = N * H * W.
"""

import torch
from torch import Tensor

from kernels.pool import reference as pool


def _per_channel(value_C: Tensor) -> Tensor:
    return value_C[:, None, None]


def _penalty_terms(ratio_C: Tensor, form: str, tau: float) -> tuple[Tensor, Tensor]:
    """phi(r) and phi'(r): r² or max(0, |r| - tau)²."""
    if form == "square":
        return ratio_C * ratio_C, 2 * ratio_C
    excess_C = (ratio_C.abs() - tau).clamp(min=0)
    return excess_C * excess_C, 2 * excess_C * ratio_C.sign()


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
    probe_N: Tensor | None,
    eps: float,
    relu: bool,
    form: str,
    tau: float,
    through_sigma: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, the mean and biased variance used, and mean_c phi(gamma_c / sigma_c) (or 0)."""
    kind = torch.promote_types(x.dtype, torch.float32)
    if running_mean is None or running_var is None:
        mean_C = x.mean((0, 2, 3), dtype=kind)
        var_C = (x - _per_channel(mean_C)).square().mean((0, 2, 3))
    else:
        mean_C, var_C = running_mean, running_var
    sigma_C = (var_C + eps).sqrt()
    y = (x - _per_channel(mean_C)) / _per_channel(sigma_C)
    if weight is not None:
        y = y * _per_channel(weight)
    if bias is not None:
        y = y + _per_channel(bias)
    if residual is not None:
        y = y + residual
    if relu:
        y = y.relu()
    penalty = torch.zeros((), dtype=kind, device=x.device)
    if form:
        gamma_C = torch.ones_like(sigma_C) if weight is None else weight
        penalty = _penalty_terms(gamma_C / sigma_C, form, tau)[0].mean()
    return y, mean_C, var_C, penalty


def batch_norm_backward(
    grad_y: Tensor,
    grad_penalty: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean_C: Tensor,
    var_C: Tensor,
    y: Tensor | None,
    training: bool,
    eps: float,
    form: str,
    tau: float,
    through_sigma: bool,
    need_x: bool,
    need_bias: bool,
    need_residual: bool,
    need_probe: bool,
    bias: Tensor | None = None,
    added: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, residual and the probe; y is given where it went through ReLU.

    `bias`, and whether a residual was `added`, let an implementation redo the ReLU's mask from x.

    The probe's "gradient" is each sample's share of the gradients of weight and bias, squared and
    summed over channels (the penalty stays out).
    """
    grad = grad_y if y is None else torch.where(y <= 0, 0, grad_y)
    grad = grad.to(mean_C.dtype)
    sigma_C = (var_C + eps).sqrt()
    normal = (x - _per_channel(mean_C)) / _per_channel(sigma_C)
    beta_NC, gamma_NC = grad.sum((2, 3)), (grad * normal).sum((2, 3))
    grad_bias, grad_weight = beta_NC.sum(0), gamma_NC.sum(0)
    rows = x.numel() // max(1, x.shape[1])
    gamma_C = torch.ones_like(sigma_C) if weight is None else weight
    grad_x = grad
    if training and need_x:
        coupling = _per_channel(grad_bias) + normal * _per_channel(grad_weight)
        grad_x = grad - coupling / rows
    grad_x = grad_x * _per_channel(gamma_C / sigma_C)
    if grad_penalty is not None:
        ratio_C = gamma_C / sigma_C
        slope_C = grad_penalty / len(ratio_C) * _penalty_terms(ratio_C, form, tau)[1]
        grad_weight = grad_weight + slope_C / sigma_C
        if training and through_sigma:
            grad_x = grad_x - _per_channel(slope_C * ratio_C / sigma_C / rows) * normal
    return (
        grad_x if need_x else None,
        None if weight is None else grad_weight,
        grad_bias if need_bias else None,
        grad if need_residual else None,
        (beta_NC.square() + gamma_NC.square()).sum(1) if need_probe else None,
    )


def batch_norm_pool(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    probe_N: Tensor | None,
    eps: float,
    relu: bool,
    form: str,
    tau: float,
    through_sigma: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with the output's 2×2 maxima instead of the output."""
    running = (running_mean, running_var)
    y, *rest = batch_norm(
        x, weight, bias, *running, None, probe_N, eps, relu, form, tau, through_sigma
    )
    return pool.max_pool(y, 2)[0], rest[0], rest[1], rest[2]


def batch_norm_pool_backward(
    grad: Tensor,
    grad_penalty: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_C: Tensor,
    var_C: Tensor,
    training: bool,
    eps: float,
    relu: bool,
    form: str,
    tau: float,
    through_sigma: bool,
    need_x: bool,
    need_bias: bool,
    need_probe: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and the probe; the windows' winners are found again in x."""
    y = batch_norm(x, weight, bias, mean_C, var_C, None, None, eps, relu, "", tau, False)[0]
    spread = pool.max_pool_backward(grad, pool.max_pool(y, 2)[1], 2, *x.shape[2:])
    shown = y if relu else None
    saved = (x, weight, mean_C, var_C, shown, training, eps, form, tau, through_sigma)
    grads = batch_norm_backward(
        spread, grad_penalty, *saved, need_x, need_bias, False, need_probe, bias
    )
    return *grads[:3], grads[4]
