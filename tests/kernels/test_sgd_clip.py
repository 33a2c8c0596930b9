"""sgd.step with a clipping factor per model, beside torch's own clipping."""

import torch

import kernels


def test_each_model_is_clipped_by_its_own_factor():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(3, *shape, generator=generator)  # noqa: E731
    params, grads = {"w": draw(4, 5), "b": draw(5)}, {"w": draw(4, 5), "b": draw(5)}
    twins = [{k: v[m].clone().requires_grad_() for k, v in params.items()} for m in range(3)]
    scales = []
    for m, twin in enumerate(twins):
        for name, value in twin.items():
            value.grad = grads[name][m].clone()
        norm = torch.nn.utils.clip_grad_norm_(twin.values(), 1.5)
        scales.append(min(1.0, 1.5 / (float(norm) + 1e-6)))
        torch.optim.SGD(twin.values(), lr=0.3, momentum=0.9).step()
    momenta = {k: torch.zeros_like(v) for k, v in params.items()}
    lr, scale = torch.full((3,), 0.3), torch.tensor(scales)
    kernels.sgd.step(params, grads, momenta, lr, 0 * lr, grad_scale_M=scale)
    for name, value in params.items():
        want = torch.stack([twin[name].detach() for twin in twins])
        assert torch.allclose(value, want, rtol=1e-6, atol=1e-7)
