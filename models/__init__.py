"""Language models whose recurrent layers run on any `leapquant_jax` state method.

`models.qwen35` is the Qwen3.5 text model (gated DeltaNet and gated attention); `models.kimi_delta` is the Kimi
delta attention layer. Both keep parameters in `flax.nnx` modules, which are ordinary JAX pytrees, and every
state of a request in an explicit cache that goes in and comes out of each call.
"""
