"""Derivatives of solutions equal closed forms, finite differences, and derivatives through all steps."""

import pytest
import torch

import moduli as mo

D = torch.float64


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


X, Y = numbers(30, 4), numbers(30, seed=1)
TIME = torch.linspace(0, 2, 20, dtype=D)
DATA = 2 * torch.exp(-1.3 * TIME) + 0.1 * torch.sin(7 * TIME)


def solve(fun, x0, *args, **options):
    return mo.minimize(fun, x0, args=args, implicit=True, **options).x


def ridge(w, lam):
    return 0.5 * ((X @ w - Y) ** 2).sum() + 0.5 * lam.exp() * (w**2).sum()


def ridge_closed(lam):
    return torch.linalg.solve(X.T @ X + lam.exp() * torch.eye(4, dtype=D), X.T @ Y)


def logistic(w, lam):
    return torch.nn.functional.softplus(-Y.sign() * (X @ w)).sum() + 0.5 * (lam.exp() * w**2).sum()


def rosenbrock(x, a):
    return (a[0] - x[0]) ** 2 + a[1] * (x[1] - x[0] ** 2) ** 2


def decay(p, weights):
    return weights.exp() * (p["a"] * torch.exp(-p["b"] * TIME) - DATA)


def quadratic(x, b):
    return 0.5 * (x**2).sum() - b @ x


def simplex_constraints(b):
    return [
        {"type": "eq", "fun": lambda x, b: x.sum() - b[0], "args": (b,)},
        {"type": "ineq", "fun": lambda x: x - 0.1},
    ]


def bilevel(lam):
    """Return an outer loss of the inner solution."""
    w = solve(ridge, torch.zeros(4, dtype=D), lam)
    return ((X[:7] @ w - Y[:7].roll(1)) ** 2).sum()


PROBLEMS = {
    "ridge": (lambda lam: solve(ridge, torch.zeros(4, dtype=D), lam), torch.tensor(0.3, dtype=D)),
    "logistic": (lambda lam: solve(logistic, torch.zeros(4, dtype=D), lam), numbers(4, seed=2)),
    "rosenbrock": (lambda a: solve(rosenbrock, torch.zeros(2, dtype=D), a), torch.tensor([1.2, 50.0], dtype=D)),
    "fit": (lambda w: solve(decay, {"a": 1.0, "b": 1.0}, w)["b"], numbers(20, seed=3)),
    "bounds": (
        lambda lam: solve(ridge, torch.full((4,), 0.05, dtype=D), lam, lower=0.0),
        torch.tensor(0.3, dtype=D),
    ),
    "bounds by transform": (
        lambda b: solve(quadratic, torch.full((3,), 0.5, dtype=D), b, bounds=[(0, 1)] * 3, bounds_by="transform"),
        torch.tensor([0.4, 2.0, -1.0], dtype=D),
    ),
    "quadratic program": (
        lambda b: solve(quadratic, torch.zeros(3, dtype=D), b, constraints=simplex_constraints(b)),
        torch.tensor([1.0, 2.0, -3.0], dtype=D),
    ),
    "circle": (
        lambda c: solve(
            lambda x, c: (c * x).sum(),
            torch.tensor([-1.0, -1.0], dtype=D),
            c,
            constraints={"type": "eq", "fun": lambda x, c: (x**2).sum() - c.square().mean(), "args": (c,)},
        ),
        torch.tensor([1.0, 2.0], dtype=D),
    ),
    "augmented Lagrangian": (
        lambda b: solve(
            quadratic,
            torch.zeros(3, dtype=D),
            b,
            method="bfgs",
            constraints={"type": "ineq", "fun": lambda x, b: b[0] - x.sum(), "args": (b,)},
        ),
        torch.tensor([0.5, 2.0, 1.0], dtype=D),
    ),
    "bilevel": (bilevel, torch.tensor(0.3, dtype=D)),
    "several starts": (lambda lam: solve(ridge, numbers(3, 4, seed=5), lam, batched=True), torch.tensor(0.3, dtype=D)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_derivatives_equal_finite_differences_in_both_modes(name):
    find, theta = PROBLEMS[name]
    theta = theta.clone().requires_grad_()
    assert torch.autograd.gradcheck(find, theta, eps=1e-5, atol=1e-6, rtol=1e-6, check_forward_ad=True)


@pytest.mark.parametrize("name", ["ridge", "logistic", "bounds", "quadratic program", "circle", "bilevel"])
def test_second_derivatives_equal_finite_differences(name):
    find, theta = PROBLEMS[name]
    assert torch.autograd.gradgradcheck(find, theta.clone().requires_grad_(), eps=1e-5, atol=1e-5, rtol=1e-5)


def test_transforms_of_torch_equal_the_closed_form():
    find, lam = PROBLEMS["ridge"][0], torch.linspace(0, 1, 3, dtype=D)
    jacrev, jacfwd, vmap = torch.func.jacrev, torch.func.jacfwd, torch.func.vmap
    # The closed form is differentiated in reverse mode: torch's forward derivatives of linalg.solve are wrong under vmap.
    second = jacrev(jacrev(ridge_closed))(lam[1])
    for transform in (jacrev, jacfwd):
        torch.testing.assert_close(transform(find)(lam[1]), jacrev(ridge_closed)(lam[1]), rtol=1e-9, atol=1e-11)
        for outer in (jacrev, jacfwd):
            torch.testing.assert_close(outer(transform(find))(lam[1]), second, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(vmap(transform(find))(lam), vmap(jacrev(ridge_closed))(lam), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(jacrev(vmap(find))(lam), jacrev(vmap(ridge_closed))(lam), rtol=1e-9, atol=1e-11)


def test_the_implicit_derivative_equals_the_one_through_all_steps():
    theta = numbers(4, seed=2).requires_grad_()
    w = torch.zeros(4, dtype=D)
    for _ in range(8):  # Newton's method, recorded in a graph
        gradient, hessian = torch.func.grad(logistic)(w, theta), torch.func.hessian(logistic)(w, theta)
        w = w - torch.linalg.solve(hessian, gradient)
    u = numbers(4, seed=4)
    (unrolled,) = torch.autograd.grad(w, theta, u)
    (implicit,) = torch.autograd.grad(PROBLEMS["logistic"][0](theta), theta, u)
    torch.testing.assert_close(implicit, unrolled, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("constrained", [False, True])
def test_many_variables_are_solved_by_products_with_vectors(constrained):
    A = numbers(300, 300)
    A = A @ A.T / 300 + torch.eye(300, dtype=D)
    c = torch.ones(300, dtype=D)
    options = {"constraints": {"type": "eq", "fun": lambda x: c @ x - 1}, "method": "lbfgs"} if constrained else {}

    def find(t):
        return solve(lambda x, t: 0.5 * x @ (A @ x) - (t * x).sum(), torch.zeros(300, dtype=D), t, **options)

    t, v = numbers(300, seed=6).requires_grad_(), numbers(300, seed=7)
    (gradient,) = torch.autograd.grad(find(t), t, v)
    expected = torch.linalg.solve(A, v)
    if constrained:
        a = torch.linalg.solve(A, c)
        expected = expected - a * (a @ v) / (c @ a)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    tangent = torch.func.jvp(find, (t.detach(),), (v,))[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-9)


def test_labelled_tensors_dictionaries_and_closures_are_differentiated():
    space = mo.Space(("u", "v"), "axis")
    theta = torch.tensor([1.0, 2.0], dtype=D, requires_grad=True)
    x0 = {"p": mo.Tensor(torch.zeros(2, dtype=D), (space,))}
    args = ({"at": [mo.Tensor(theta, (space,))]},)
    result = mo.minimize(lambda x, a: ((x["p"] - a["at"][0]) ** 2).sum(), x0, args=args, implicit=True)
    assert result.x["p"].dims == (space,)
    (gradient,) = torch.autograd.grad((result.x["p"].data * torch.tensor([3.0, 4.0], dtype=D)).sum(), theta)
    torch.testing.assert_close(gradient, torch.tensor([3.0, 4.0], dtype=D))
    closed = mo.minimize(lambda x: ((x - theta) ** 2).sum(), torch.zeros(2, dtype=D), implicit=True)
    torch.testing.assert_close(torch.autograd.grad(closed.x[0], theta)[0], torch.tensor([1.0, 0.0], dtype=D))


def test_the_result_equals_that_of_a_plain_run():
    lam = torch.tensor(0.3, dtype=D, requires_grad=True)
    result = mo.minimize(ridge, torch.zeros(4, dtype=D), args=lam, implicit=True)
    plain = mo.minimize(ridge, torch.zeros(4, dtype=D), args=(lam.detach(),))
    assert (result.success, result.evaluations, result.value) == (plain.success, plain.evaluations, plain.value)
    torch.testing.assert_close(result.x.detach(), plain.x, rtol=0, atol=1e-7)
    assert result.x.requires_grad
    assert not plain.x.requires_grad
    torch.testing.assert_close(result.stderr, plain.stderr, rtol=1e-5, atol=1e-8)


def test_solutions_without_a_derivative_are_refused():
    lam = torch.tensor(0.3, dtype=D, requires_grad=True)
    with pytest.raises(ValueError, match="singular at the solution"):
        solve(lambda x, a: (x.sum() - a) ** 2, torch.zeros(2, dtype=D), lam)
    with pytest.raises(ValueError, match="Write a bound that depends on a tensor as a constraint"):
        solve(lambda x, a: (x**2).sum(), torch.ones(2, dtype=D), lam, lower=lam)
    with pytest.raises(TypeError, match="functional_call"):
        solve(lambda net, a: net.weight.square().sum() * a, torch.nn.Linear(2, 1), lam)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_derivatives_in_half_precision(dtype):
    c = torch.tensor([3.0, 1.0], dtype=dtype, requires_grad=True)
    result = mo.minimize(lambda x, c: ((x - 2 * c) ** 2).sum(), torch.zeros(2, dtype=dtype), args=(c,), implicit=True)
    result.x.sum().backward()
    torch.testing.assert_close(c.grad, torch.full_like(c, 2.0))
