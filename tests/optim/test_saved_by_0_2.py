"""State dicts and checkpoints written by moduli 0.2 load, continue as they did there, and are saved again equal."""

import gzip
import io
from pathlib import Path

import pytest
import torch

import moduli as mo
from optim.saved_cases import CASES, STEPS, read_state, train

FOLDER = Path(__file__).parent / "saved_by_0_2"
PORTABLE = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.portable.pt.gz"))
# Version 0.2 stored the state of half-precision parameters in half precision, and rounded more often.
TOLERANCES = {"half": (1e-2, 1e-2)}


def set_values(model, values):
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)


def go_on(name, model, opt, saved):
    assert opt.current_step == STEPS
    rtol, atol = TOLERANCES.get(name, (1e-9, 1e-12))
    torch.testing.assert_close(train(model, opt), saved["after"], rtol=rtol, atol=atol)


def resave(opt):
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize(("name", "portable"), [(name, False) for name in CASES] + [(name, True) for name in PORTABLE])
def test_state_dicts_resume(name, portable):
    saved = read_state(FOLDER, name, portable)
    model, opt = CASES[name]()
    set_values(model, saved["before"])
    opt.load_state_dict(saved["state"])
    again, other = CASES[name]()
    set_values(again, saved["before"])
    other.load_state_dict(resave(opt))
    go_on(name, model, opt, saved)
    go_on(name, again, other, saved)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_resume(name, tmp_path):
    saved, path = read_state(FOLDER, name), tmp_path / "saved.safetensors"
    path.write_bytes(gzip.decompress((FOLDER / f"{name}.safetensors.gz").read_bytes()))
    for _ in range(2):  # the second time from a file written by this version
        model, opt = CASES[name]()
        part = {"population": model} if isinstance(model, mo.Population) else {"module": model}
        mo.load(path, **part, optimizer=opt, rng=False)
        mo.save(path, **part, optimizer=opt, rng=False)
        go_on(name, model, opt, saved)
