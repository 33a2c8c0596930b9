"""Stacks: M networks of one architecture in one state whose tensors have a leading model axis.

M models, B batch, K classes. Models are ordinary modules; a skeleton of theirs holds no data, and
torch.func calls it with the state of one model at a time under vmap.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

import kernels
from engine import seeds
from engine.models.layers import Layer, take_penalty

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class StackedState:
    """Parameters and buffers by name, each (M, ...)."""

    params: Tensors
    buffers: Tensors

    @property
    def models(self) -> int:
        """M."""
        return len(next(iter(self.params.values())))

    def select(self, models: Sequence[int]) -> "StackedState":
        """A copy of the chosen slots, in the given order."""
        return self._map(lambda tensor: tensor.detach()[list(models)])

    def unstack(self, model: int) -> Tensors:
        """One model's state_dict, sharing memory with the stack."""
        return {n: t.detach()[model] for n, t in {**self.params, **self.buffers}.items()}

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "StackedState":
        """The stack on a device, floating tensors in the given type."""
        return self._map(
            lambda t: t.detach().to(device, dtype if t.is_floating_point() else t.dtype)
        )

    def clone_buffers(self) -> Tensors:
        """A copy of the buffers, for forward passes that must leave the running ones alone."""
        return {name: tensor.clone() for name, tensor in self.buffers.items()}

    def _map(self, change: Callable[[Tensor], Tensor]) -> "StackedState":
        return StackedState(
            params={name: kernels.laid_out(change(tensor)) for name, tensor in self.params.items()},
            buffers={name: change(tensor) for name, tensor in self.buffers.items()},
        )


def build_stack(
    make: Callable[[], nn.Module], study_seed: int, model_ids: Sequence[int]
) -> tuple[nn.Module, StackedState]:
    """Build one network per model id, each from its own keys, and stack them.

    The engine's own layers are drawn from a key of their path in the network, so that arms share
    initial values wherever layers agree. All else in a user's module is whatever its constructor
    draws under the model's own seed.

    Args:
        make: builds one network; called once per model with torch's generator seeded (and restored
            afterwards).
        study_seed: the study's seed.
        model_ids: one per slot; the same id always gives the same network.

    Returns:
        The skeleton, on the meta device, and the state on the CPU.
    """
    if not model_ids:
        raise ValueError("a stack needs at least one model")
    nets = [initialised(make, study_seed, model_id) for model_id in model_ids]
    refuse_ambient_randomness(nets[0])
    skeleton = copy.deepcopy(nets[0]).to("meta")
    params = [dict(net.named_parameters()) for net in nets]
    buffers = [dict(net.named_buffers()) for net in nets]
    return skeleton, StackedState(
        params={name: kernels.laid_out(tensor) for name, tensor in _stacked(params).items()},
        buffers=_stacked(buffers),
    )


def initialised(make: Callable[[], nn.Module], study_seed: int, model_id: int) -> nn.Module:
    """One network with the initial values of a model id."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.key(study_seed, "init", model_id=model_id))
        net = make()
    for path, module in net.named_modules():
        if isinstance(module, Layer):
            generator = torch.Generator()
            generator.manual_seed(seeds.key(study_seed, "init", model_id=model_id, name=path))
            module.draw(generator)
    return net


def refuse_ambient_randomness(net: nn.Module) -> None:
    """Raise on layers that draw from torch's global generator while training."""
    for path, module in net.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"'{path}' is torch's {type(module).__name__}, whose draws depend on how models "
                "are stacked: set its p to 0 or leave it out"
            )


def _stacked(states: Sequence[Mapping[str, Tensor]]) -> Tensors:
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def zeros(tensors: Mapping[str, Tensor]) -> Tensors:
    """Zeros with the names, shapes and layout of stacked parameters."""
    return {name: kernels.laid_out(torch.zeros_like(tensor)) for name, tensor in tensors.items()}


def forward(skeleton: nn.Module, state: StackedState, images_MBCHW: Tensor) -> Tensor:
    """Logits (M, B, K), every model on its own images, in the skeleton's mode, without gradient."""

    def one(params: Tensors, buffers: Tensors, images: Tensor) -> Tensor:
        logits: Tensor = functional_call(skeleton, (params, buffers), (images,))
        return logits

    with torch.no_grad():
        logits_MBK: Tensor = torch.vmap(one)(state.params, state.buffers, images_MBCHW)
        take_penalty(skeleton)
    return logits_MBK


def gradients(
    skeleton: nn.Module,
    state: StackedState,
    images_MBCHW: Tensor,
    labels_MB: Tensor,
    lambda_M: Tensor,
) -> tuple[Tensor, Tensors]:
    """Losses (M, B) and the gradient of each model's mean loss + lambda * penalty.

    Nothing is summed over models or even over a batch here: the mean enters as the losses' own
    gradient, 1 / B, so no reduction can depend on how models are stacked. In training mode the
    running statistics of `state` move in place.
    """

    def one(params: Tensors, buffers: Tensors, images: Tensor, labels: Tensor) -> list[Tensor]:
        logits = functional_call(skeleton, (params, buffers), (images,))
        penalty = take_penalty(skeleton)
        loss_B = kernels.cross_entropy(logits, labels)
        return [loss_B] if penalty is None else [loss_B, penalty]

    params = {name: tensor.detach().requires_grad_() for name, tensor in state.params.items()}
    outputs = torch.vmap(one)(params, state.buffers, images_MBCHW, labels_MB)
    loss_MB = outputs[0]
    weights = [torch.full_like(loss_MB, 1 / loss_MB.shape[1]), lambda_M][: len(outputs)]
    grads = torch.autograd.grad(outputs, list(params.values()), weights)
    return loss_MB.detach(), dict(zip(params, grads, strict=True))
