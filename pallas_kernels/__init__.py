"""Mosaic GPU kernels for Hopper (sm_90) behind `implementation="mosaic_gpu"` of `leapquant_jax`. See README.md."""

from pallas_kernels.append import append as append
from pallas_kernels.fold import fold as fold
from pallas_kernels.support import supports as supports
from pallas_kernels.tuning import Launch as Launch
