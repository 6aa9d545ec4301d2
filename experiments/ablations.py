"""Methods that the library does not name: LeapQuant with single parts taken out, or others put in."""

import leapquant_jax as lq

# "hadamard" is rotated and clipped, "kept" the paper's method with its compensators kept.
ABLATIONS: dict[str, lq.LeapConfig] = {
    "window-int8+smoothing": lq.LeapConfig(bits=8, rank=0),
    "window-int8+compensators": lq.LeapConfig(bits=8, rank=4, smoothing=0),
    "leapquant-int8-kept": lq.LeapConfig(bits=8, rank=4),
    "leapquant-int8-svd": lq.LeapConfig(bits=8, rank=4, smoothing=1, fit="svd"),
    "leapquant-int8-bf16-records": lq.LeapConfig(
        bits=8, smoothing=1, record_dtype="bfloat16", compensator_dtype="bfloat16"
    ),
    "leapquant-int8-hadamard": lq.LeapConfig(bits=8, rank=4, smoothing=1, rotation="hadamard", clip="mse"),
    "leapquant-int6-hadamard": lq.LeapConfig(bits=6, rank=6, smoothing=1, rotation="hadamard", clip="mse"),
    "leapquant-int6-no-clip": lq.LeapConfig(bits=6, rank=6, smoothing=1),
    "leapquant-int4-no-clip": lq.LeapConfig(bits=4, rank=6, smoothing=1, rotation="hadamard"),
    "leapquant-int4-clip": lq.LeapConfig(bits=4, rank=6, smoothing=1, clip="mse"),
    "window-fp32": lq.LeapConfig(bits=None, boundary_dtype="float32", rank=0, smoothing=0),
}


def known_methods() -> list[str]:
    """Every name that `get_method` takes: the library's, then the ablations."""
    return [*lq.list_methods(), *ABLATIONS]


def get_method(name: str) -> lq.Method:
    """The state method of that name.

    Raises:
      ValueError: Unknown name; the message lists the known ones.
    """
    if name in ABLATIONS:
        return lq.LeapMethod(ABLATIONS[name], name)
    if name not in lq.list_methods():
        raise ValueError(f"unknown method {name!r}: choose from {', '.join(known_methods())}")
    return lq.get_method(name)
