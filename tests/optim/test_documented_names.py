"""Every name that the documentation of `moduli.optim` promises exists in its module."""

import inspect

import pytest

from moduli import optim

MODULE = (
    "apply get_H get_child_projected_buffers get_generator get_state increment_counter inner_step inner_step_tensors "
    "on_get_projected_buffers reset reset_for_online set_param_groups state_dict step update set_child store "
    "set_children_sequence get_children_sequence get_settings clear_state_keys add_projected_keys"
)
OBJECTIVE = (
    "get_loss get_grads get_loss_grads get_updates clone update_attrs_from_clone_ zero_grad poptemp update_parameters "
    "apply_post_step_hooks hessian_vector_product hessian_matrix_product hutchinson_hessian hessian derivatives "
    "derivatives_at list_Hvp_function tensor_Hvp_function"
)
ATTRIBUTES = (
    "params closure model current_step modular parent update updates grads loss loss_approx post_step_hooks attrs "
    "storage stop skip_update should_terminate temp"
)
TENSOR = (
    "multi_tensor_apply multi_tensor_initialize multi_tensor_update single_tensor_apply single_tensor_initialize "
    "single_tensor_update update_states apply_states"
)


def words(text):
    return text.split()


@pytest.mark.parametrize(
    ("cls", "names"),
    [(optim.Module, MODULE), (optim.Objective, OBJECTIVE), (optim.TensorTransform, TENSOR)],
    ids=["Module", "Objective", "TensorTransform"],
)
def test_methods(cls, names):
    for name in words(names):
        assert callable(getattr(cls, name)), name
        assert inspect.getdoc(getattr(cls, name)), name


def test_attributes_of_an_objective():
    objective = optim.Objective([])
    assert all(hasattr(objective, name) for name in words(ATTRIBUTES))


def test_modules():
    for name in ("chain", "functional", "modular", "module", "reformulation", "transform"):
        assert inspect.ismodule(getattr(optim, name))
    for name in (
        "Chain",
        "Chainable",
        "maybe_chain",
        "Module",
        "Objective",
        "Optimizer",
        "TensorTransform",
        "Transform",
    ):
        assert name in optim.__all__
    assert optim.modular.Optimizer is optim.Optimizer
    assert optim.chain.Chain is optim.Chain
    assert {"step", "update", "apply", "step_tensors"} <= set(optim.functional.__all__)


def test_arguments_of_the_documented_signatures():
    names = list(inspect.signature(optim.Module.inner_step_tensors).parameters)
    assert names == words("self key tensors clone params grads loss closure objective must_exist")
    names = list(inspect.signature(optim.TensorTransform).parameters)
    assert names == words("defaults update_freq concat_params uses_grad uses_loss inner")
    names = list(inspect.signature(optim.Module.get_state).parameters)
    assert names == words("self params key key2 keys must_exist init cls")
