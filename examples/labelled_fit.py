"""Fit a labelled linear model by gradient descent and print the fitted coefficients beside the true ones.

Run it with `python examples/labelled_fit.py`.
"""

import torch
from rich.console import Console
from rich.table import Table

import moduli as mo

TRUTH = {"bias": 1.5, "age": -0.8, "dose": 2.0, "age*dose": 0.3}


def measurements(count: int, generator: torch.Generator) -> tuple[mo.Tensor, mo.Tensor]:
    """Return the features of patients, and their response to the true coefficients with noise."""
    age, dose = torch.randn(2, count, generator=generator, dtype=torch.float64)
    columns = {"dose": dose, "bias": torch.ones_like(dose), "age*dose": age * dose, "age": age}
    features = mo.stack({name: mo.tensor(column, "patient") for name, column in columns.items()}, "feature")
    truth = mo.tensor(list(TRUTH.values()), feature=list(TRUTH), dtype=torch.float64)
    noise = 0.1 * mo.randn(patient=count, generator=generator, dtype=torch.float64)
    # Features and true coefficients are in different orders, and are paired by label.
    return features, mo.dot(truth, features, over="feature") + noise


def fit(features: mo.Tensor, response: mo.Tensor, steps: int = 200, rate: float = 0.2) -> tuple[mo.Tensor, list[float]]:
    """Return the coefficients that minimise the mean squared error, and the losses of all steps."""
    coefficients = mo.zeros(features.dims[:1], dtype=torch.float64).attach()
    losses = []
    for _ in range(steps):
        loss = ((mo.dot(coefficients, features, over="feature") - response) ** 2).mean()
        loss.backward()
        losses.append(loss.item())
        coefficients = (coefficients - rate * coefficients.grad).attach()
    return coefficients, losses


def main() -> None:
    """Make data, fit it, and print a table."""
    features, response = measurements(400, torch.Generator().manual_seed(0))
    coefficients, losses = fit(features, response)
    table = Table(title="A labelled linear model, fitted by gradients")
    table.add_column("feature")
    table.add_column("truth", justify="right")
    table.add_column("fitted", justify="right")
    table.add_column("error", justify="right")
    for name, truth in TRUTH.items():
        fitted = coefficients.sel(feature=name)
        table.add_row(name, f"{truth:+.3f}", f"{fitted:+.3f}", f"{fitted - truth:+.3f}")
    console = Console()
    console.print(table)
    console.print(f"mean squared error: {losses[0]:.4f} at the start, {losses[-1]:.4f} after {len(losses)} steps")


if __name__ == "__main__":
    main()
