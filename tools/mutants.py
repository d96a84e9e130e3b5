"""Break links one line at a time and see whether their quick tests notice: ``make mutants``.

A mutant is one line of a link, changed to something plausible and wrong: a bias correction left out, two axes swapped, a
bound dropped. The classes of the changed file stand in `moduli.m` for those of the file while the tests of its link run: its
rows of the law book under the laws "reference" and "optimum", and what pytest finds by the given arguments. A mutant that no
test notices survives, and is a test to write.

    python tools/mutants.py            all of them
    python tools/mutants.py Dion LMO   those of some links
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pathlib
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from moduli.testing import check_law

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "moduli" / "m"
sys.path.insert(0, str(ROOT / "tests"))

from laws.registry import collect  # noqa: E402 (it is found in the folder of the tests)


class Link(NamedTuple):
    """A link, its file, the rows of the law book and the arguments of pytest that test it, and what to change in it."""

    name: str
    file: str
    rows: tuple[str, ...]
    tests: tuple[str, ...]
    mutants: tuple[tuple[str, str], ...]


LINKS = [
    Link(
        "ADOPT",
        "adaptive/_adopt.py",
        ("ADOPT",),
        ("tests/m/test_adaptive.py", "-k", "adopt"),
        (
            ("bound = before**0.25", "bound = before**0.5"),
            ('.clamp(min=setting["eps"])', ' + setting["eps"]'),
            ("(first + (1 - first) * (1 - beta2))", "(1 - beta2)"),
        ),
    ),
    Link(
        "AdEMAMix",
        "adaptive/_ademamix.py",
        ("AdEMAMix",),
        (),
        (
            ('state["exp_avg_slow"] * alpha', 'state["exp_avg_slow"]'),
            ('1 / math.log(setting["beta3_start"]), 1 / math.log(beta3)', 'setting["beta3_start"], beta3'),
            ('alpha = alpha * _rise(t, setting["warmup"])', "alpha = alpha * 1.0"),
        ),
    ),
    Link(
        "Adafactor",
        "adaptive/_adafactor.py",
        ("Adafactor",),
        ("tests/m/test_matrix_links.py", "-k", "adafactor"),
        (
            ('1 - state["step"] ** -setting["decay"]', '1 - (state["step"] + 1) ** -setting["decay"]'),
            ("rows / rows.mean(-1, keepdim=True)", "rows"),
            ('min(1e-2, state["step"] ** -0.5)', 'state["step"] ** -0.5'),
            ('.clamp(min=setting["scale_eps"])', ""),
        ),
    ),
    Link(
        "CAME",
        "adaptive/_came.py",
        ("CAME",),
        (),
        (
            ('(scaled - state["exp_avg"])', "(scaled)"),
            ('rebuild(state, "instability_").rsqrt()', 'rebuild(state, "instability_").sqrt()'),
            ('setting["beta3"], "instability_"', 'setting["beta2"], "instability_"'),
        ),
    ),
    Link(
        "AdamMini",
        "adaptive/_adam_mini.py",
        ("AdamMini",),
        (),
        (
            ('(1 - setting["beta2"] ** t)', "1.0"),
            ("        count = tensor.shape[0]", "        count = 1"),
        ),
    ),
    Link(
        "TrustRatio",
        "step_size/_trust_ratio.py",
        ("TrustRatio",),
        (),
        (
            ('step + decay * size + setting["eps"]', 'step + setting["eps"]'),
            ("(u + x * decay) * ratio", "u * ratio"),
            ('counted * setting["trust"]', "counted"),
        ),
    ),
    Link(
        "GrokFast",
        "momentum/_grokfast.py",
        ("GrokFast",),
        (),
        (
            ('state["exp_avg"] * setting["lamb"]', 'state["exp_avg"]'),
            ('state["exp_avg"] = tensor.clone()', 'state["exp_avg"] = torch.zeros_like(tensor)'),
        ),
    ),
    Link(
        "Lookahead",
        "momentum/_lookahead.py",
        ("Lookahead",),
        (),
        (
            ('setting["alpha"] * back', "back"),
            ('state["slow"].lerp_(param - tensor,', 'state["slow"].lerp_(param,'),
        ),
    ),
    Link(
        "GaLore",
        "projections/_low_rank.py",
        ("GaLore",),
        ("tests/m/test_matrix_links.py", "-k", "galore or low_rank or fira or apollo"),
        (
            ("[0][:, : self.rank]", "[0][:, -self.rank :]"),
            ('self.expand(tensor, matrix, row) * self.settings[param]["scale"]', "self.expand(tensor, matrix, row)"),
            ("(made - 1) % self.update_gap == 0", "made == 1"),
        ),
    ),
    Link(
        "Fira",
        "projections/_low_rank.py",
        ("Fira",),
        ("tests/m/test_matrix_links.py", "-k", "galore or low_rank or fira or apollo"),
        (
            ('(matrix - state["basis"] @ seen) * _ratios', "matrix * _ratios"),
            ("torch.linalg.vector_norm(t, dim=0)", "torch.linalg.vector_norm(t)"),
            ("+ _limit_growth(rest, state, self.growth)", "+ rest"),
        ),
    ),
    Link(
        "APOLLO",
        "projections/_low_rank.py",
        ("APOLLO",),
        ("tests/m/test_matrix_links.py", "-k", "galore or low_rank or fira or apollo"),
        (
            ("return _limit_growth(matrix * ratio, state, self.growth)", "return matrix * ratio"),
            ("ratio = _ratios(inner, seen)", "ratio = 1 / _ratios(inner, seen)"),
            ("drawn.mT / self.rank**0.5", "drawn.mT"),
        ),
    ),
    Link(
        "Dion",
        "adaptive/_dion.py",
        ("Dion",),
        ("tests/m/test_matrix_links.py", "-k", "dion"),
        (
            ("total - (1 - mu) * left", "total - left"),
            ("(rows / columns) ** 0.5 * state", "1.0 * state"),
            ("right / torch.where(size > 0, size, 1.0)", "right"),
        ),
    ),
    Link(
        "LMO",
        "adaptive/_lmo.py",
        ("LMO",),
        ("tests/m/test_matrix_links.py", "-k", "lmo"),
        (
            ("tensor) * (rows / columns) ** 0.5", "tensor)"),
            ("/ (tensor[0].numel() if tensor.dim() > 1 and tensor.numel() else 1)", ""),
            ("_unit(x, -2), tensor) * x.shape[-2] ** 0.5", "_unit(x, -1), tensor) * x.shape[-2] ** 0.5"),
            ("_unit(x, -1), tensor) / x.shape[-1] ** 0.5", "_unit(x, -1), tensor)"),
            ("_unit(tensor.to(wide), None) * tensor.numel() ** 0.5", "_unit(tensor.to(wide), None)"),
        ),
    ),
    Link(
        "NeuronNormalize",
        "adaptive/_neuron_normalize.py",
        ("NeuronNormalize",),
        (),
        (
            (".abs().square().mean(-1)", ".abs().square().mean(-2)[: x.shape[0]]"),
            ("out * (0.2 * x.numel() ** 0.5 /", "out * (x.numel() ** 0.5 /"),
            ('lerp_(square, 1 - setting["beta"])', "lerp_(square, 1.0)"),
        ),
    ),
    Link(
        "QKClip",
        "clipping/_qk_clip.py",
        ("QKClip",),
        ("tests/m/test_matrix_links.py", "-k", "qk_clip"),
        (
            ('(key, 1 - setting["alpha"])', '(key, setting["tau"])'),
            ('.clamp(min=setting["tau"])', ""),
            ("(weight.detach() - updates[i]) * scale", "weight.detach() * scale"),
        ),
    ),
    Link(
        "KLShampoo",
        "adaptive/_kl_shampoo.py",
        ("KLShampoo",),
        (),
        (
            ('x @ state["right_inverse"] @ x.mH / columns', "x @ x.mH / columns"),
            ("(vectors * values**-0.5) @ vectors.mH", "(vectors * values**-0.25) @ vectors.mH"),
            ("identity * size\n", "identity\n"),
        ),
    ),
    Link(
        "SPlus",
        "adaptive/_splus.py",
        ("SPlus",),
        (),
        (
            ("rotated.sgn(), 0.0)", "rotated, 0.0)"),
            ("* (2 / (len(left) + len(right)))", ""),
            ('lerp_(x.mH @ x, 1 - setting["beta2"])', 'lerp_(x.mH @ x, 1 - setting["beta1"])'),
        ),
    ),
    Link(
        "Quantized",
        "meta/_quantized.py",
        ("Quantized",),
        ("tests/m/test_matrix_links.py", "-k", "bit_by_bit or refuses or slow_mean or keep_their_size"),
        (
            ("part**4 if kept.dtype", "part**3 if kept.dtype"),
            ("torch.where((levels == 0) & (part > 0), 1.0, levels)", "levels"),
            ("((places * _ALONG + step * _OVER) % 1.0)", "(0.5 + 0 * places)"),
            ("scale.repeat_interleave(block)[: kept.numel()]", "scale.repeat(block)[: kept.numel()]"),
        ),
    ),
    Link(
        "AdaBelief",
        "adaptive/_adabelief.py",
        ("AdaBelief",),
        (),
        (('away = tensor - state["exp_avg"]', "away = tensor"), ('.add_(setting["eps"])', "")),
    ),
    Link(
        "Adadelta",
        "adaptive/_adadelta.py",
        ("Adadelta",),
        (),
        (("(before.clamp(min=0) + eps)", '(state["acc_delta"] + eps)'),),
    ),
    Link(
        "Adamax",
        "adaptive/_adamax.py",
        ("Adamax",),
        (),
        (('state["exp_inf"] * setting["beta2"], tensor', 'state["exp_inf"], tensor'),),
    ),
    Link(
        "RAdam",
        "adaptive/_radam.py",
        ("RAdam",),
        (),
        (("(length > 5)", "(length > 4)"), ("(rectified * (1 - power))", "(1 - power)")),
    ),
    Link(
        "NAdam",
        "adaptive/_nadam.py",
        ("NAdam",),
        (),
        (("(1 - product * ahead)", "(1 - product)"), ("0.96 ** (t *", "0.9 ** (t *")),
    ),
    Link(
        "ScheduleFree",
        "momentum/_schedule_free.py",
        ("ScheduleFree",),
        ("tests/m/test_free.py", "tests/m/test_matrix_links.py", "-k", "schedule_free"),
        (
            ("c = t**self.r * size**2 / total", "c = t**self.r * size / total"),
            ("(1 - beta + beta * c)", "(1 - beta)"),
        ),
    ),
    Link(
        "Prodigy",
        "adaptive/_prodigy.py",
        ("Prodigy",),
        ("tests/m/test_free.py", "tests/m/test_matrix_links.py", "-k", "prodigy or paper"),
        (
            ('+ d * setting["eps"]', '+ setting["eps"]'),
            ('(size * setting["weight_decay"])', 'setting["weight_decay"]'),
        ),
    ),
    Link(
        "DAdaptAdam",
        "adaptive/_dadapt.py",
        ("DAdaptAdam",),
        ("tests/m/test_free.py", "-k", "paper or schedule"),
        (
            ('size = d * row["gamma"]', "size = d"),
            ("(1 - rho) * total, 0.0", "total, 0.0"),
        ),
    ),
    Link(
        "Orthogonalize",
        "adaptive/_orthogonalize.py",
        ("Orthogonalize",),
        ("tests/m/test_matrix_links.py", "tests/m/test_adaptive.py", "-k", "ortho or muon or polar"),
        (
            ("(a / safe, b / safe**3, c / safe**5)", "(a, b, c)"),
            ("gram = multiply_symmetric(half, rest, half, beta=a)", "gram = half"),
        ),
    ),
    Link(
        "NewtonCG",
        "second_order/_newton_cg.py",
        (),
        ("tests/m/test_second_links.py", "-k", "newton_cg"),
        (
            ("return out + p * (slope / -curvature)", "return out"),
            ("(slope / -curvature)", "slope"),
        ),
    ),
    Link(
        "SOAP",
        "adaptive/_soap.py",
        ("SOAP",),
        ("tests/m/test_adaptive.py", "-k", "soap"),
        (
            ('t = state["step"] - 1\n', 't = state["step"]\n'),
            (".index_select(axis, order)", ""),
            ("        if mean is not None:\n", "        if False:\n"),
        ),
    ),
    Link(
        "SPSA1",
        "grad_approximation/_spsa1.py",
        ("SPSA1",),
        (),
        (
            ("slope = value() / (h * count)", "slope = value() / h"),
            ("param.copy_(x + h * v)", "param.copy_(x - h * v)"),
        ),
    ),
    Link(
        "RandomHvp",
        "misc/_curvature.py",
        ("RandomHvp",),
        (),
        (
            ("(v.conj() * Hv if self.zHz else Hv) / self.n_samples", "v.conj() * Hv"),
            ("v.conj() * Hv if self.zHz else Hv", "Hv"),
        ),
    ),
    Link(
        "WeightDropout and RandomReinitialize",
        "weight_decay/_random.py",
        ("WeightDropout", "RandomReinitialize"),
        (),
        (
            ("param.masked_fill_(dropped, 0)", "param.masked_fill_(~dropped, 0)"),
            ('state["stored"] = param.detach().clone()', 'state["stored"] = torch.zeros_like(param)'),
            (
                'coin < self.settings[param]["p_reinit"]',
                'coin > self.settings[param]["p_reinit"]',
            ),
        ),
    ),
]


def main(names: list[str]) -> int:
    """Try the mutants, and print which survive and the score."""
    unknown = set(names) - {link.name for link in LINKS}
    if unknown:
        print(f"no mutants of {', '.join(sorted(unknown))}; there are some of {', '.join(link.name for link in LINKS)}")
        return 2
    links = [link for link in LINKS if not names or link.name in names]
    if stale := find_stale(links):
        print(*stale, "bring tools/mutants.py up to date", sep="\n")
        return 2
    killed = 0
    for link in links:
        if notices(link):
            print(f"the tests of {link.name} fail without a mutant")
            return 1
        for old, new in link.mutants:
            with standing_in(link, old, new):
                dead = notices(link)
            killed += dead
            print(f"{'killed  ' if dead else 'SURVIVES'} {link.name}: {old!r} -> {new!r}", flush=True)
    total = sum(len(link.mutants) for link in links)
    print(f"{killed} of {total} mutants of {len(links)} links are killed")
    return 0 if killed == total else 1


def find_stale(links: Sequence[Link]) -> list[str]:
    """A line for each change of something that is no longer in the file of its link."""
    return [
        f"{link.name}: {old!r} is not in {link.file}"
        for link in links
        for old, _ in link.mutants
        if old not in (SOURCE / link.file).read_text(encoding="utf-8")
    ]


@contextlib.contextmanager
def standing_in(link: Link, old: str, new: str) -> Iterator[None]:
    """The classes of a link's file, with a line changed, in place of those in `moduli.m`."""
    path = SOURCE / link.file
    text = path.read_text(encoding="utf-8")
    name = "moduli.m." + link.file.removesuffix(".py").replace("/", ".")
    original, mutant = importlib.import_module(name), types.ModuleType(name)
    mutant.__package__ = name.rpartition(".")[0]
    exec(compile(text.replace(old, new), str(path), "exec"), mutant.__dict__)
    classes = {
        key: value for key, value in vars(original).items() if inspect.isclass(value) and value.__module__ == name
    }
    holders = [module for key, module in sys.modules.items() if key == "moduli" or key.startswith("moduli.")]
    places = [(h, key) for h in holders for key, value in classes.items() if vars(h).get(key) is value]
    try:
        for holder, key in places:
            setattr(holder, key, getattr(mutant, key))
        yield
    finally:
        for holder, key in places:
            setattr(holder, key, classes[key])


def notices(link: Link) -> bool:
    """Whether a test of a link fails."""
    for row in ROWS:
        if row.name.split(",")[0] in link.rows:
            for law in ("reference", "optimum"):
                try:
                    check_law(row, law)
                except Exception:  # noqa: BLE001 (whatever a broken link raises, it was noticed)
                    return True
    if not link.tests:
        return False
    # Tests that name a class when they are imported are to name the one that stands there now.
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2].startswith("test_") and str(ROOT) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *link.tests]) != 0


ROWS = collect()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
