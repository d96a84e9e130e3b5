"""Run the law of `test_wrappings` for every row of the law book and every preset, under every wrapping."""

import pytest
import torch

from optim.run_wrappings import check, run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.mark.parametrize(("kind", "count"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("tp", 4), ("fsdp1", 2)])
def test_every_link_and_preset_takes_the_steps_of_one_process(tmp_path, kind, count):
    check(run(tmp_path, kind, count, []), [])
