"""Estimate the warming per region from two archives with gaps, whose years and latitudes overlap, and draw a map.

Run it with `python examples/climate.py`; it needs `moduli[plot]` and writes `trend.png`.
"""

import math

import numpy as np
import torch

import moduli as mo

WARMING = {"tropics": 0.10, "middle": 0.20, "polar": 0.45}  # degrees per decade in the synthetic data
MONTHS = np.arange("1980-01", "2010-01", dtype="datetime64[M]").astype("datetime64[D]")
LATITUDES = np.arange(-85.0, 90.0, 10.0)
LONGITUDES = np.arange(0.0, 360.0, 30.0)


def find_region(latitude: float) -> str:
    """Return the region of a latitude."""
    return "tropics" if abs(latitude) < 30 else "middle" if abs(latitude) < 60 else "polar"


def measure(months: np.ndarray, latitudes: np.ndarray, gaps: float, seed: int) -> mo.Tensor:
    """Return synthetic monthly temperatures of an archive: a season, a trend, noise, and gaps."""
    generator = torch.Generator().manual_seed(seed)
    dims = (mo.Space(months, "time"), mo.Space(latitudes, "lat"), mo.Space(LONGITUDES, "lon"))
    month = np.arange(len(months)) + (months[0] - MONTHS[0]).astype("timedelta64[M]").astype(int)
    decades = mo.Tensor(torch.from_numpy(month / 120), dims[0])
    season = mo.Tensor(torch.from_numpy(np.cos(month * math.pi / 6)), dims[0])
    rate = mo.tensor([WARMING[find_region(each)] for each in latitudes], lat=latitudes, dtype=torch.float64)
    climate = mo.tensor(30 - 0.4 * np.abs(latitudes), lat=latitudes)
    noise = 0.8 * mo.randn(dims, generator=generator, dtype=torch.float64)
    values = noise + climate + rate * decades - season * mo.tensor(0.1 * latitudes, lat=latitudes)
    return values.where(mo.rand(dims, generator=generator) > gaps)


def combine(*archives: mo.Tensor) -> mo.Tensor:
    """Return the mean of all archives that have an entry."""
    with mo.join("outer"):  # entries that an archive does not cover are NaN
        together = mo.stack(archives, "archive").mean("archive", skipna=True)
    return together.sel(time=MONTHS, lat=LATITUDES)  # in order


def remove_season(values: mo.Tensor) -> mo.Tensor:
    """Return differences from the mean of each month over years that both archives cover, since cells begin at different times."""
    usual = values.sel(time=slice("1990", "1999")).groupby("time.month").mean(skipna=True)
    return values.groupby("time.month") - usual


def average_regions(values: mo.Tensor) -> mo.Tensor:
    """Return the mean of each region, weighted by the area of its cells that have a value."""
    area = mo.tensor(np.cos(np.deg2rad(LATITUDES)), lat=LATITUDES)
    weighted = (values * area).groupby(lat=find_region).sum(skipna=True).sum("lon")
    weights = (values.notnull() * area).groupby(lat=find_region).sum().sum("lon")
    return (weighted / weights).rename(lat="region")


def fit_trends(series: mo.Tensor, decades: mo.Tensor) -> tuple[mo.Tensor, mo.Tensor]:
    """Return the trend of each region and its standard error, from one fit of all of them."""
    start = {name: mo.zeros(series.dims[1:], dtype=torch.float64) for name in ("level", "trend")}
    fit = mo.minimize(lambda p: p["level"] + p["trend"] * decades - series, start, nan="mask")
    return fit.x["trend"], fit.stderr["trend"]


def map_trends(values: mo.Tensor, decades: mo.Tensor) -> mo.Tensor:
    """Return the slope of a straight line through the values of each cell, without gaps."""
    x = (decades + 0 * values).where(values.notnull())
    x = x - x.mean("time", skipna=True)
    return (x * values).sum("time", skipna=True) / x.square().sum("time", skipna=True)


def main() -> None:
    """Combine the archives, fit the trends, and draw the map."""
    satellites = measure(MONTHS[120:], LATITUDES, gaps=0.1, seed=0)
    stations = measure(MONTHS[:240], LATITUDES[4:-2], gaps=0.4, seed=1)
    temperature = combine(satellites, stations)
    anomaly = remove_season(temperature)
    share = float(temperature.isnull().double().mean())
    print(f"{temperature.sizes}, {share:.0%} of it gaps")

    decades = mo.tensor(np.arange(len(MONTHS)) / 120, time=MONTHS)
    trend, error = fit_trends(average_regions(anomaly), decades)
    for region, truth in WARMING.items():
        print(
            f"{region:8} {trend.sel(region=region):+.3f} +- {error.sel(region=region):.3f} per decade, made with {truth:+.2f}"
        )

    figure = map_trends(anomaly, decades).plot(cmap="RdBu_r", vmin=-0.6, vmax=0.6)
    figure.axes[0].set_title("warming per decade")
    figure.savefig("trend.png", dpi=80)
    print("the map is in trend.png")


if __name__ == "__main__":
    main()
