"""LeapQuant-JAX: low-bit recurrent states for linear attention."""

from leapquant_jax.chunked import chunked_delta_rule as chunked_delta_rule
from leapquant_jax.exact import exact_decode as exact_decode
from leapquant_jax.exact import exact_step as exact_step
from leapquant_jax.numerics import l2norm as l2norm
