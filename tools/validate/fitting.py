"""Sections on minimising: NIST's regressions, Moré, Garbow and Hillstrom, Hock and Schittkowski, and BBOB."""

from __future__ import annotations

import re

import torch
from _section import BENCHMARKS, ROOT, Section, capture, is_installed, load, tabulate


def check_nist() -> Section:
    """Return the section on NIST StRD and Moré, Garbow and Hillstrom, beside MINPACK, SciPy's trf and lmfit."""
    nist = load(BENCHMARKS / "nist.py")
    torch.set_num_threads(1)
    fits, problems = nist.measure_nist(), nist.measure_mgh()
    lost = []
    for key, fit in fits["moduli"].items():
        best = max(fits, key=lambda who: min(fits[who][key].digits, 8))
        other = fits[best][key].digits
        if min(other, 8) - min(fit.digits, 8) > 0.5:
            lost.append(f"{key[0]} from start {key[1]}: {fit.digits:.1f} digits, {best} {other:.1f}")
    for name, by in problems.items():
        ours, theirs = by["moduli"], by["SciPy lm (MINPACK)"]
        if (not ours[1] and theirs[1]) or (ours[1] and theirs[1] and ours[0] > theirs[0]):
            lost.append(f"{name}: {ours[0]} evaluations, MINPACK {theirs[0]}")
    about = (
        "27 data sets of NIST StRD with two starting points each, and Moré, Garbow and Hillstrom's least-squares problems. A fit "
        "counts where every parameter has four certified digits. Nothing here is random. A row counts as lost where another "
        "program has half a digit more, up to eight, or MINPACK fewer evaluations."
    )
    return Section(
        "Least squares: NIST StRD, and Moré, Garbow and Hillstrom", about, "python benchmarks/nist.py", nist.page(fits, problems),
        lost, ("torch", "scipy", "lmfit"),
    )  # fmt: skip


def check_constraints() -> Section:
    """Return the section on Hock and Schittkowski, beside SciPy's SLSQP."""
    from scipy.optimize import minimize as scipy_minimize

    from moduli import minimize

    problems = load(ROOT / "tests" / "minimize" / "hock_schittkowski.py").PROBLEMS
    rows, lost = [], []
    for number, (fun, x0, best, constraints, bounds) in sorted(problems.items()):
        start = _clip(x0, bounds)
        result = minimize(fun, start, "sqp", bounds=bounds, constraints=constraints)

        theirs = scipy_minimize(
            _evaluate(fun), start.numpy(), jac=_differentiate(fun), method="SLSQP", bounds=bounds,
            constraints=[{"type": c["type"], "fun": _evaluate(c["fun"]), "jac": _differentiate(c["fun"])} for c in constraints],
        )  # fmt: skip
        close = 1e-5 * max(1.0, abs(best))
        ours_solved, theirs_solved = float(result.value) - best <= close, float(theirs.fun) - best <= close
        rows.append((
            f"HS {number}", f"{best:.8g}", f"{float(result.value) - best:.1e}{'' if ours_solved else ' *'}",
            result.nfev if hasattr(result, "nfev") else "", f"{float(theirs.fun) - best:.1e}{'' if theirs_solved else ' *'}",
            theirs.nfev,
        ))  # fmt: skip
        if theirs_solved and not ours_solved:
            lost.append(f"HS {number}: {float(result.value) - best:.1e} above the optimum, SLSQP reaches it")
    about = (
        f'{len(problems)} problems of Hock and Schittkowski (1981) from their published starts, by `minimize(..., "sqp")` and by '
        "SciPy's SLSQP with exact derivatives: value minus the published optimum, a star where that is more than 1e-5. Nothing "
        "here is random. Stars on both sides are other local optima."
    )
    heads = ("problem", "optimum", "moduli minus optimum", "evaluations", "SLSQP minus optimum", "evaluations")
    command = "python tools/validate constraints"
    return Section(
        "Constraints: Hock and Schittkowski", about, command, tabulate(heads, rows), lost, ("torch", "scipy")
    )


def _clip(x0, bounds):
    """Return a start within the bounds, which some published starts are not."""
    limits = [(-torch.inf if low is None else low, torch.inf if high is None else high) for low, high in bounds or []]
    low, high = (
        torch.tensor(limits, dtype=x0.dtype).T if limits else (torch.tensor(-torch.inf), torch.tensor(torch.inf))
    )
    return torch.minimum(torch.maximum(x0, low), high)


def _evaluate(function):
    """Return a function as one of NumPy arrays."""
    return lambda x: function(torch.as_tensor(x, dtype=torch.float64)).detach().numpy()


def _differentiate(function):
    """Return the derivatives of a function as a function of NumPy arrays."""
    return _evaluate(torch.func.jacrev(function))


BBOB_METHODS = (
    "CMAES",
    "pycma",
    "cmaes",
    "CMAES bipop",
    "pycma bipop",
    "DE",
    "L-SHADE polish",
    "SciPy DE",
    "SciPy DE polish",
)
BBOB_BUDGET = 400


def check_bbob() -> Section:
    """Return the section on BBOB through `ioh`, beside pycma, cmaes and SciPy."""
    words = ["--seeds", "3", "--budget", str(BBOB_BUDGET), "--workers", "2", "--methods", *BBOB_METHODS]
    command = "python benchmarks/bbob.py " + " ".join(f'"{word}"' if " " in word else word for word in words)
    about = (
        "The 24 noiseless functions, instances 1 to 3, in 5 and 10 dimensions, from the same random points and step sizes. Shares "
        f"of 51 targets from 100 to 1e-8 that were reached within {BBOB_BUDGET} evaluations per dimension. Three instances are "
        "few: two methods whose means differ by less than two standard errors are not told apart."
    )
    versions = ("ioh", "cma", "cmaes", "scipy")
    if not is_installed("ioh"):
        return Section("Search: BBOB", about, command, "ioh is not installed.", ["ioh is not installed"], versions)
    bbob = load(BENCHMARKS / "bbob.py")
    packages = {"pycma": "cma", "pycma bipop": "cma", "cmaes": "cmaes"}
    missing = [name for name, package in packages.items() if not is_installed(package)]
    with capture() as printed:
        bbob.main([word for word in words if word not in missing])
    text = printed.getvalue().partition("\n\n")[2]
    lost = []
    pairs = (
        ("CMAES", "pycma"),
        ("CMAES", "cmaes"),
        ("CMAES bipop", "pycma bipop"),
        ("DE", "SciPy DE"),
        ("L-SHADE polish", "SciPy DE polish"),
    )
    for part in text.split("\n\n"):
        dims = re.search(r"\| (\d+) dimensions", part)
        values = {
            row[1]: (float(row[2]), float(row[3]))
            for row in re.finditer(r"^\| ([^|]+?) \|.*\| ([\d.]+) \| ([\d.]+) \|$", part, re.M)
        }
        for ours, theirs in pairs:
            if ours in values and theirs in values and values[ours][0] < values[theirs][0]:
                difference = values[theirs][0] - values[ours][0]
                error = (values[ours][1] ** 2 + values[theirs][1] ** 2) ** 0.5
                noise = "" if difference > 2 * error else ", within two standard errors"
                lost.append(
                    f"{dims[1]} dimensions, {ours}: {values[ours][0]:.3f}, {theirs} {values[theirs][0]:.3f}{noise}"
                )
    if missing:
        text += "\n\nNot installed: " + ", ".join(missing) + "."
    return Section("Search: BBOB through ioh", about, command, text.strip(), lost, versions)
