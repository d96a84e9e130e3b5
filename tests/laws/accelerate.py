"""A process with a fake accelerator: puts every k-th row under the law of accelerators and prints what it found as JSON."""

from __future__ import annotations

import json
import sys
import warnings

from laws.fake_device import check_accelerator, leave
from laws.registry import collect
from moduli.testing import LawError

# The row's constraint is a function of tensors on the host, so there is nothing of it to see on a device.
ON_HOST = ("AugmentedLagrangian",)


def main(part: int, parts: int) -> None:
    warnings.simplefilter("ignore")
    found: dict[str, str | None] = {}
    for row in [row for row in collect() if not row.members][part::parts]:
        try:
            if row.name not in ON_HOST:
                check_accelerator(row)
            found[row.name] = None
        except LawError as error:
            found[row.name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    leave()
