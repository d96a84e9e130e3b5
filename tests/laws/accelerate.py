"""Put every k-th row under the law of accelerators, on a fake one, and print the errors by row as JSON."""

from __future__ import annotations

import json
import sys
import warnings

from laws.fake_device import check_accelerator, leave
from laws.registry import collect
from moduli.testing import LawError

# The constraint of this row is a function of host tensors, so it can't run on a device.
ON_HOST = ("AugmentedLagrangian",)


def main(part: int, parts: int) -> None:
    warnings.simplefilter("ignore")
    errors: dict[str, str | None] = {}
    for row in [row for row in collect() if not row.members][part::parts]:
        try:
            if row.name not in ON_HOST:
                check_accelerator(row)
            errors[row.name] = None
        except LawError as error:
            errors[row.name] = str(error)
    print(json.dumps(errors))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    leave()
