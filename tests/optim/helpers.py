"""Small links that do one thing each, so that tests of the core do not depend on `moduli.m`."""

import torch

from moduli.optim import Module, Need, TensorTransform


class Half(TensorTransform):
    elementwise = True

    def __init__(self, factor=0.5):
        super().__init__({"factor": factor})

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * setting["factor"]


class Momentum(TensorTransform):
    """u <- m = beta m + u."""

    elementwise = True

    def __init__(self, *, momentum=0.9):
        super().__init__({"momentum": momentum})
        self.add_projected_keys("grad", "buffer")

    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        state["buffer"] = torch.zeros_like(tensor)

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        state["buffer"].mul_(setting["momentum"]).add_(tensor)

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return state["buffer"].clone()


class Vector(TensorTransform):
    """Momentum over one vector of all parameters, reversed with itself so that order matters."""

    def __init__(self, *, beta=0.9):
        super().__init__({"beta": beta}, concat_params=True)

    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        state["buffer"] = torch.zeros_like(tensor)
        state["outer"] = torch.zeros(tensor.numel(), tensor.numel(), dtype=tensor.dtype)

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        state["buffer"].mul_(setting["beta"]).add_(tensor)
        state["outer"].mul_(setting["beta"]).add_(torch.outer(tensor, tensor))

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return state["buffer"] + 0.01 * state["outer"] @ tensor


class Noise(TensorTransform):
    def __init__(self, *, seed=0):
        super().__init__({})
        self.seed = seed

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        generator = self.get_generator(tensor.device, self.seed)
        return tensor + 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


class Backtrack(Module):
    """Halves the step until the loss decreases; moves the parameters itself."""

    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.CLOSURE})

    def __init__(self, *, tries=20):
        super().__init__({"tries": tries})

    def apply(self, objective):
        start = [p.detach().clone() for p in objective.params]
        first = objective.get_loss_grads()[0]
        direction = objective.get_updates()
        size = 1.0
        for _ in range(self.defaults["tries"]):
            objective.move_to([s - size * d for s, d in zip(start, direction, strict=True)])
            loss = objective.get_loss(backward=True, at_x0=False)
            if bool(loss < first):
                break
            size /= 2
        objective.accepted = (
            [p.detach().clone() for p in objective.params],
            loss,
            [p.grad for p in objective.params],
        )
        objective.attrs["size"] = size
        objective.skip_update = True
        return objective


class WantsLoss(Module):
    needs = frozenset({Need.LOSS})

    def apply(self, objective):
        objective.attrs["loss seen"] = objective.get_loss(backward=False)
        return objective


class WantsProducts(Module):
    """Replaces the update by its product with the Hessian."""

    needs = frozenset({Need.GRADIENT, Need.PRODUCTS})

    def apply(self, objective):
        objective.updates = objective.hessian_vector_product(objective.get_updates())[0]
        return objective


class Newton(Module):
    needs = frozenset({Need.GRADIENT, Need.HESSIAN})

    def apply(self, objective):
        _, grads, H = objective.hessian()
        flat = torch.cat([g.reshape(-1) for g in grads])
        step = torch.linalg.lstsq(H, flat[:, None]).solution[:, 0]
        sizes = [p.numel() for p in objective.params]
        objective.updates = [
            part.view_as(p) for part, p in zip(torch.split(step, sizes), objective.params, strict=True)
        ]
        return objective


class Stop(Module):
    def apply(self, objective):
        objective.stop = True
        return objective


class Terminate(Module):
    def __init__(self, reason="enough"):
        super().__init__()
        self.reason = reason

    def update(self, objective):
        objective.terminate(self.reason)

    def apply(self, objective):
        return objective


class Counted:
    """A closure's function that counts its calls."""

    def __init__(self, fn):
        self.fn = fn
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.fn()
