"""A labelled fit, with error bars.

Three bands of a spectrum, known by their names. `mo.minimize` gets residuals, so it fits by least squares and knows the standard
error of every parameter; what was labelled comes back labelled.
"""

import torch

import moduli as mo

torch.manual_seed(0)
bands = ["sigma", "pi", "delta"]
energy = mo.tensor(torch.linspace(0, 10, 60, dtype=torch.float64), "energy")


def spectrum(center, height):
    return (height * (-((energy - center) ** 2)).exp()).sum("band")


center = mo.tensor([2.0, 5.0, 7.5], band=bands, dtype=torch.float64)
height = mo.tensor([1.0, 0.5, 2.0], band=bands, dtype=torch.float64)
measured = spectrum(center, height) + 0.15 * mo.randn(energy=60, dtype=torch.float64)

start = {"center": center + 0.4, "height": mo.ones(band=bands, dtype=torch.float64)}
fit = mo.minimize(lambda p: spectrum(p["center"], p["height"]) - measured, start)

for band in reversed(bands):  # any order: bands are found by name
    found, error = fit.x["center"].sel(band=band), fit.stderr["center"].sel(band=band)
    print(f"{band:6} center {found:.3f} +/- {error:.3f}, truth {center.sel(band=band):.3f}")
print(fit.reason)

picture = mo.lab.Sketch("energy", "intensity")
picture.add_points(energy, measured, "measured")
picture.add_line(energy, spectrum(**fit.x), "fit")
picture.add_points(fit.x["center"], fit.x["height"], "bands", errors=fit.stderr["height"])

if __name__ == "__main__":
    picture.write("fit.svg")
