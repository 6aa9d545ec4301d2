"""What the kernels can run."""

import jax
from jax import Array

from leapquant_jax.config import LeapConfig
from leapquant_jax.state import LeapState


def supports(config: LeapConfig, state: LeapState) -> str | None:
    """None when `append` and `fold` can run this config and state on the default device, otherwise the reason.

    Args:
      config: of the state.
      state: a `LeapState` (only shapes and dtypes are looked at).
    """
    return supports_layout(config, state) or _supports_device()


def supports_layout(config: LeapConfig, state: LeapState) -> str | None:
    """`supports`, whatever the device: for lowering on a machine without a GPU."""
    dims = (state.key_dim, state.value_dim)
    repeats = state.num_heads // state.num_key_heads
    half = "float16"
    wanted = [
        (config.bits == 8, f"the kernels read 8-bit codes, not bits={config.bits}"),
        (state.gate == "scalar", "the kernels take one decay per head (gate='scalar'), not one per key channel"),
        (config.rotation is None, f"the kernels do not rotate (rotation={config.rotation!r})"),
        (config.clip is None, f"the kernels do not clip (clip={config.clip!r})"),
        (
            config.smoothing in (0.5, 1.0),
            f"the kernels smooth with exponent 0.5 or 1, not smoothing={config.smoothing}",
        ),
        (1 <= config.rank <= 8, f"the kernels keep 1 to 8 compensators, not rank={config.rank}"),
        (config.record_dtype == half, f"the kernels keep float16 records, not record_dtype={config.record_dtype!r}"),
        (
            config.compensator_dtype == half,
            f"the kernels keep float16 compensators, not compensator_dtype={config.compensator_dtype!r}",
        ),
        (config.fit == "subspace", f"the kernels fit by subspace iteration, not fit={config.fit!r}"),
        (
            config.window in (8, 16, 24, 32),
            f"the kernels keep a window of 8, 16, 24 or 32 records, not window={config.window}",
        ),
        (dims in ((128, 128), (64, 64)), f"the kernels run heads of 128 x 128 or 64 x 64, not {dims[0]} x {dims[1]}"),
        (repeats <= 4, f"the kernels serve up to 4 value heads per key head, not {repeats}"),
    ]
    return next((reason for ok, reason in wanted if not ok), None)


def _supports_device() -> str | None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the kernels need a Hopper GPU (sm_90) and the default device is {device.device_kind!r}"
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.startswith("9."):
        return (
            f"the kernels need compute capability 9.0 and {device.device_kind!r} has {capability or 'an unknown one'}"
        )
    return None


def boundary_leaves(state: LeapState) -> dict[str, Array]:
    """The leaves a fold rewrites, in the order in which the kernels take them; a state they support has them all."""
    names = ("codes", "row_scales", "column_scales", "compensator_keys", "compensator_values")
    leaves = {name: getattr(state, name) for name in names}
    missing = [name for name, leaf in leaves.items() if leaf is None]
    if missing:
        raise NotImplementedError(f"the kernels need {', '.join(missing)}: see pallas_kernels.supports")
    return leaves
