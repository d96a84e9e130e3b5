"""The defaults of presets beside those of the implementations that they follow: `docs/preset-defaults.md`.

    python tools/preset_defaults.py           # prints the page
    python tools/preset_defaults.py --write   # writes it
    python tools/preset_defaults.py --check   # compares what is recorded here with the installed implementations

`tests/presets/test_defaults.py` compares presets with what is recorded here, and the page with what this program prints.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moduli import presets

PAGE = Path(__file__).parent.parent / "docs" / "preset-defaults.md"
VERSIONS = {"torch": "2.13.0", "pytorch_optimizer": "4.1.0"}
BETAS = {"beta1": ("betas[0]", 0.9), "beta2": ("betas[1]", 0.999)}
DECAY = {"weight_decay": ("weight_decay", 0.0)}
Defaults = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class Reference:
    """An implementation that a preset follows.

    Attributes:
        path: Its class, "torch.optim.Adam".
        defaults: For each argument of the preset the argument there and its default; "betas[0]" is the first of a tuple, and
            "-decay" the negative of a number.
        differs: For each argument with another default here, why.
    """

    path: str
    defaults: Defaults
    differs: dict[str, str] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The package that it is from."""
        return self.path.partition(".")[0]


def _torch(name: str, defaults: Defaults, **differs: str) -> Reference:
    return Reference(f"torch.optim.{name}", defaults, differs)


def _peer(name: str, defaults: Defaults, **differs: str) -> Reference:
    return Reference(f"pytorch_optimizer.{name}", defaults, differs)


def _lr(value: float) -> Defaults:
    return {"lr": ("lr", value)}


def _eps(value: float) -> Defaults:
    return {"eps": ("eps", value)}


_ADAM = {**_lr(1e-3), **BETAS, **_eps(1e-8), **DECAY}
# No source says why: the value is older than this comparison.
_OWN = "this library's choice, kept for programs that rely on it"

REFERENCES: dict[str, Reference] = {
    "sgd": _torch("SGD", {**_lr(1e-3), **DECAY}, lr=_OWN),
    "momentum": _torch(
        "SGD",
        {**_lr(1e-3), "momentum": ("momentum", 0.0), "dampening": ("dampening", 0.0), **DECAY},
        lr=_OWN,
        momentum="what the preset is for",
    ),
    "nesterov": _torch(
        "SGD",
        {**_lr(1e-3), "momentum": ("momentum", 0.0), **DECAY},
        lr=_OWN,
        momentum="what the preset is for",
    ),
    "adam": _torch("Adam", {**_ADAM, "amsgrad": ("amsgrad", False)}),
    "adamw": _torch("AdamW", {**_ADAM, "weight_decay": ("weight_decay", 0.01), "amsgrad": ("amsgrad", False)}),
    "adamax": _torch("Adamax", {**_ADAM, **_lr(2e-3)}),
    "nadam": _torch("NAdam", {**_ADAM, **_lr(2e-3), "momentum_decay": ("momentum_decay", 4e-3)}),
    "radam": _torch("RAdam", _ADAM),
    "rmsprop": _torch(
        "RMSprop",
        {
            **_lr(1e-2),
            "smoothing": ("alpha", 0.99),
            **_eps(1e-8),
            "centered": ("centered", False),
            "momentum": ("momentum", 0.0),
            **DECAY,
        },
    ),
    "adagrad": _torch(
        "Adagrad",
        {
            **_lr(1e-2),
            "lr_decay": ("lr_decay", 0.0),
            "initial_accumulator_value": ("initial_accumulator_value", 0.0),
            **_eps(1e-10),
            **DECAY,
        },
    ),
    "adadelta": _torch("Adadelta", {**_lr(1.0), "rho": ("rho", 0.9), **_eps(1e-6), **DECAY}),
    "rprop": _torch(
        "Rprop",
        {
            **_lr(1e-2),
            "nminus": ("etas[0]", 0.5),
            "nplus": ("etas[1]", 1.2),
            "lb": ("step_sizes[0]", 1e-6),
            "ub": ("step_sizes[1]", 50.0),
        },
    ),
    "adafactor": _torch(
        "Adafactor",
        {**_lr(1e-2), "decay": ("-beta2_decay", 0.8), "clip": ("d", 1.0), **DECAY},
        lr="None takes steps relative to the size of parameters, see `m.Adafactor`",
    ),
    "muon": _torch(
        "Muon",
        {
            **_lr(1e-3),
            "momentum": ("momentum", 0.95),
            "steps": ("ns_steps", 5),
            "weight_decay": ("weight_decay", 0.1),
        },
        weight_decay=_OWN,
    ),
    "lbfgs": _torch("LBFGS", {"history_size": ("history_size", 100)}, history_size=_OWN),
    "lion": _peer("Lion", {**_lr(1e-4), "beta1": ("betas[0]", 0.9), "beta2": ("betas[1]", 0.99), **DECAY}),
    "adan": _peer(
        "Adan",
        {
            **_lr(1e-3),
            "beta1": ("betas[0]", 0.98),
            "beta2": ("betas[1]", 0.92),
            "beta3": ("betas[2]", 0.99),
            **_eps(1e-8),
            **DECAY,
        },
    ),
    "adabelief": _peer("AdaBelief", {**_ADAM, **_eps(1e-16)}),
    "ademamix": _peer(
        "AdEMAMix",
        {
            **_lr(1e-3),
            **BETAS,
            "beta3": ("betas[2]", 0.9999),
            "alpha": ("alpha", 5.0),
            "warmup": ("t_alpha_beta3", None),
            **DECAY,
        },
    ),
    "adopt": _peer("ADOPT", {**_ADAM, "beta2": ("betas[1]", 0.9999), **_eps(1e-6)}),
    "adam_mini": _peer(
        "AdamMini",
        {**_ADAM, **_lr(1.0), "weight_decay": ("weight_decay", 0.1)},
        lr=_OWN,
        weight_decay=_OWN,
    ),
    "laprop": _peer("LaProp", {**_ADAM, **_lr(4e-4), **_eps(1e-15)}),
    "lamb": _peer("Lamb", {**_ADAM, **_eps(1e-6)}),
    "lars": _peer(
        "LARS",
        {**_lr(1e-3), "momentum": ("momentum", 0.9), "trust": ("trust_coefficient", 1e-3), **DECAY},
        lr=_OWN,
    ),
    "mars": _peer(
        "MARS",
        {
            **_lr(3e-3),
            "beta1": ("betas[0]", 0.95),
            "beta2": ("betas[1]", 0.99),
            "scaling": ("gamma", 0.025),
            **_eps(1e-8),
            **DECAY,
        },
    ),
    "sam": _peer("SAM", {"rho": ("rho", 0.05)}),
    "prodigy": _peer("Prodigy", {**_lr(1.0), **BETAS, "d0": ("d0", 1e-6), **DECAY}),
    "dadapt": _peer("DAdaptAdam", {**_lr(1.0), **BETAS, "d0": ("d0", 1e-6), **DECAY}),
    "schedule_free": _peer(
        "ScheduleFreeAdamW",
        {
            **_lr(2.5e-3),
            "momentum": ("betas[0]", 0.9),
            "beta2": ("betas[1]", 0.999),
            **_eps(1e-8),
            **DECAY,
            "warmup": ("warmup_steps", 0),
        },
    ),
    "schedule_free_sgd": _peer(
        "ScheduleFreeSGD", {**_lr(1.0), "momentum": ("momentum", 0.9), **DECAY, "warmup": ("warmup_steps", 0)}
    ),
    "soap": _peer(
        "SOAP",
        {
            **_lr(3e-3),
            "beta1": ("betas[0]", 0.95),
            "beta2": ("betas[1]", 0.95),
            "precond_freq": ("precondition_frequency", 10),
            "precondition_1d": ("precondition_1d", False),
            "weight_decay": ("weight_decay", 0.01),
        },
    ),
    "splus": _peer(
        "SPlus", {**_lr(0.1), **BETAS, "precond_freq": ("inverse_steps", 100), "weight_decay": ("weight_decay", 0.01)}
    ),
    "shampoo": _peer(
        "Shampoo",
        {**_lr(1e-3), "momentum": ("momentum", 0.0), "precond_freq": ("preconditioning_compute_steps", 1), **DECAY},
        lr=_OWN,
        momentum=_OWN,
        precond_freq=_OWN,
    ),
    "psgd": _peer("Kron", {**_lr(1e-3), "momentum": ("momentum", 0.9), **DECAY}),
    "came": _peer("CAME", {**_lr(2e-4), **BETAS, "beta3": ("betas[2]", 0.9999), **DECAY}),
    "apollo": _peer("APOLLO", {**_lr(1e-2), **DECAY}),
    "galore": _peer("GaLore", {**_lr(1e-3), **DECAY}, lr=_OWN),
    "fira": _peer("Fira", {**_lr(1e-3), **DECAY}, lr=_OWN),
    "normuon": _peer(
        "NorMuon",
        {**_lr(0.02), "momentum": ("momentum", 0.95), "row_beta": ("beta2", 0.95), **DECAY},
        lr="updates are scaled to the size of Adam's, so that the step size is Adam's",
    ),
    "scion": _peer(
        "SCION",
        {**_lr(1e-3), "momentum": ("momentum", 0.1), "constrained": ("constraint", False)},
        momentum="the same rule: 0.1 is the weight of the new gradient there, 0.9 that of the old mean here",
        constrained=_OWN,
    ),
    "adahessian": _peer("AdaHessian", {**_lr(0.1)}),
    "sophia": _peer("SophiaH", {**_lr(0.06)}, lr=_OWN),
}

# Without a counterpart of that name in either package.
WITHOUT = (
    "adam8bit",
    "bfgs",
    "cg",
    "dion",
    "gauss_newton",
    "kl_shampoo",
    "levenberg_marquardt",
    "muonclip",
    "newton",
    "newton_cg",
    "spsa",
    "trust_cg",
    "trust_exact",
)


def list_defaults(preset: str) -> dict[str, Any]:
    """Return the defaults of a preset, by argument."""
    parameters = inspect.signature(getattr(presets, preset)).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def read_default(reference: Reference, argument: str) -> Any:
    """Return the default of an argument of the installed implementation."""
    module, _, name = reference.path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    bare, _, index = argument.lstrip("-").partition("[")
    value = parameters[bare].default
    value = value[int(index.rstrip("]"))] if index else value
    return -value if argument.startswith("-") else value


def render_page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Defaults of presets",
        "",
        "This page compares the default arguments of the functions in `moduli.presets` with those of the implementations that",
        "they follow, for users who switch between them. The last column explains each difference. `pytorch_optimizer`",
        "is a collection of methods of many authors, whose defaults can differ from those of an author's own code. Arguments that",
        "only one side has are not compared, and neither are details of the algorithms. The page is written by",
        "`tools/preset_defaults.py` and compared with the code by the tests.",
        "",
        "Versions: " + ", ".join(f"{package} {version}" for package, version in VERSIONS.items()) + ".",
        "",
        "| preset | follows | argument | here | there | why |",
        "|---|---|---|---|---|---|",
    ]
    for preset in sorted(REFERENCES):
        reference, own = REFERENCES[preset], list_defaults(preset)
        for i, (argument, (theirs, value)) in enumerate(reference.defaults.items()):
            first = (f"`{preset}`", f"`{reference.path}`") if not i else ("", "")
            name = f"`{argument}`" if argument == theirs else f"`{argument}` (`{theirs}`)"
            row = [*first, name, f"{own[argument]!r}", f"{value!r}", reference.differs.get(argument, "")]
            lines.append("| " + " | ".join(row) + " |")
    lines += [
        "",
        "Presets that are not compared with another implementation:",
        "",
        "| preset | defaults |",
        "|---|---|",
    ]
    for preset in WITHOUT:
        own = ", ".join(f"`{name}={value!r}`" for name, value in list_defaults(preset).items()) or "none"
        lines.append(f"| `{preset}` | {own} |")
    return "\n".join(lines) + "\n"


def check_installed() -> list[str]:
    """Return what the installed implementations say otherwise; those that are not installed are left out."""
    wrong = []
    for preset, reference in REFERENCES.items():
        try:
            importlib.import_module(reference.package)
        except ImportError:
            continue
        version = importlib.metadata.version(reference.package).partition("+")[0]
        for theirs, value in reference.defaults.values():
            actual = read_default(reference, theirs)
            if actual != value:
                wrong.append(f"{preset}: {reference.path} {version} has {theirs}={actual!r}, recorded is {value!r}")
    return wrong


if __name__ == "__main__":
    if "--check" in sys.argv:
        found = check_installed()
        print("\n".join(found) or "all as recorded")
        sys.exit(bool(found))
    if "--write" in sys.argv:
        PAGE.write_text(render_page())
    else:
        print(render_page(), end="")
