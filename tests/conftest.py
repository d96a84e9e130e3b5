"""Settings shared by every test: one torch thread per worker, and hypothesis without deadlines."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Derandomised, so that a red build is red for everybody; deadlines measure the machine, not the code.
settings.register_profile(
    "moduli", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("moduli")
