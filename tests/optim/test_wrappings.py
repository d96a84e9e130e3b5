"""Under every wrapping a chain takes the steps of one process, or is refused when the optimizer is built."""

import pytest
import torch

from optim.run_wrappings import check, run

# At least one row of each kind of need, and the presets for large models; `--all` runs every row and every preset.
QUICK = [
    "Adam",
    "ClipNorm",
    "ClipNorm, each",
    "Cautious, normalised",
    "SOAP",
    "Shampoo",
    "PSGDKronWhiten",
    "Adafactor",
    "TrustRatio, LAMB",
    "Prodigy",
    "SAM",
    "ExpHomotopy",  # two reformulations in a row
    "MARSCorrection",
    "NAdam",
    "Split, line search",
    "LBFGS",
    "StrongWolfe",
    "MeZO",
    "ForwardGradient",
    "SVRG",
    "Dropout",
    "Lookahead",
    "Newton",
    "Wrap",
    "presets.muon",
]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_chains_take_the_steps_of_one_process(tmp_path, kind):
    check(run(tmp_path, kind, 2, QUICK), QUICK)
