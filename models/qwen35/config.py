"""The configuration of a Qwen3.5 text model, read from and written to Hugging Face's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

LINEAR = "linear_attention"
FULL = "full_attention"

_DTYPES = ("float32", "bfloat16", "float16")
_PRECISIONS = ("default", "high", "highest")
_OUR_FIELDS = ("layer_types", "rope_theta", "partial_rotary_factor", "eos_token_id", "dtype", "matmul_precision")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A Qwen3.5 text model. Field names are those of config.json; defaults are the fields all public sizes share.

    Attributes:
      vocab_size: Rows of the embedding.
      hidden_size: Width of the residual stream.
      intermediate_size: Width of the SwiGLU.
      num_hidden_layers: Number of layers.
      num_attention_heads: Query heads of a full layer.
      num_key_value_heads: Key and value heads of a full layer; divides `num_attention_heads`.
      head_dim: Width of an attention head.
      linear_num_key_heads: Key heads of a gated DeltaNet layer.
      linear_num_value_heads: Value heads, a multiple of the key heads. Value head h reads key head h // (HV // HK).
      linear_key_head_dim: Key width K of a gated DeltaNet head.
      linear_value_head_dim: Value width V of a gated DeltaNet head.
      linear_conv_kernel_dim: Taps of the causal depthwise convolution.
      layer_types: "linear_attention" or "full_attention" for each layer; empty means three linear, one full.
      rms_norm_eps: Epsilon of every RMS norm.
      rope_theta: Base of the rotary frequencies.
      partial_rotary_factor: Share of `head_dim` that is rotated.
      tie_word_embeddings: Whether the head is the embedding.
      max_position_embeddings: Longest context the checkpoint was trained for. Informative only.
      initializer_range: Standard deviation of fresh matrices.
      eos_token_id: Token ids that end a text.
      attention_window: An extension of ours: a full layer sees only the last `attention_window` tokens, itself
        included, and its cache is a ring of that many slots. None is ordinary causal attention.
      dtype: Dtype of the activations and of the matrix products. Recurrent states, norms, gates and softmax are
        float32 whatever it is.
      matmul_precision: `jax.lax.Precision` of the matrix products, by name. Not part of config.json.
    """

    vocab_size: int = 248320
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    layer_types: tuple[str, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 262144
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    attention_window: int | None = None
    dtype: str = "float32"
    matmul_precision: str = "highest"

    def __post_init__(self):
        if not self.layer_types:
            object.__setattr__(self, "layer_types", _layer_pattern(self.num_hidden_layers, interval=4))
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                     "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
                     "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for many, few in (("num_attention_heads", "num_key_value_heads"),
                          ("linear_num_value_heads", "linear_num_key_heads")):  # fmt: skip
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"{many}={getattr(self, many)} must be a multiple of {few}={getattr(self, few)}")
        if self.linear_conv_kernel_dim < 2:
            raise ValueError("linear_conv_kernel_dim must be at least 2: the cache keeps the last taps - 1 inputs")
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - {LINEAR, FULL}:
            raise ValueError(
                f"layer_types must name {self.num_hidden_layers} layers, each {LINEAR!r} or {FULL!r}, "
                f"got {self.layer_types}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} rotates "
                f"{self.rotary_dim} dims; it must be an even number from 2 to head_dim"
            )
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(f"attention_window must be None or at least 1, got {self.attention_window}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {_DTYPES}, got {self.dtype!r}")
        if self.matmul_precision not in _PRECISIONS:
            raise ValueError(f"matmul_precision must be one of {_PRECISIONS}, got {self.matmul_precision!r}")

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dims of an attention head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_linear_layers(self) -> int:
        """Number of gated DeltaNet layers."""
        return self.layer_types.count(LINEAR)

    @property
    def linear_conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the contents of a config.json, text-only or multimodal with a nested `text_config`.

        Args:
          fields: The parsed JSON. Fields that do not concern the text model are ignored.

        Returns:
          The configuration; `tie_word_embeddings` is true if either level says so.

        Raises:
          NotImplementedError: For mixture-of-experts models and rotary variants.
          ValueError: For a missing field or a setting the architecture does not have.
        """
        text = dict(fields.get("text_config") or fields)
        model_type = text.get("model_type", "qwen3_5_text")
        if "moe" in model_type or "num_experts" in text:
            raise NotImplementedError(f"{model_type!r} is a mixture-of-experts model; only dense Qwen3.5 is supported")
        if model_type not in ("qwen3_5_text", "qwen3_5"):
            raise ValueError(f"model_type {model_type!r} is not a Qwen3.5 text model ('qwen3_5_text')")
        if text.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {text['hidden_act']!r}")
        if text.get("attention_bias"):
            raise ValueError("attention_bias must be false: Qwen3.5 has no biases")
        rope = text.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise NotImplementedError(f"rope_type {rope['rope_type']!r} is not supported, only 'default'")

        names = {field.name for field in dataclasses.fields(cls)} - set(_OUR_FIELDS)
        known = {name: text[name] for name in names if text.get(name) is not None}
        known["tie_word_embeddings"] = bool(text.get("tie_word_embeddings") or fields.get("tie_word_embeddings"))
        known["rope_theta"] = float(rope.get("rope_theta", text.get("rope_theta", 1e7)))
        known["partial_rotary_factor"] = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        eos = text.get("eos_token_id")
        known["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        known["dtype"] = text.get("dtype") or text.get("torch_dtype") or fields.get("dtype") or "float32"
        if text.get("layer_types"):
            known["layer_types"] = tuple(text["layer_types"])
        elif "num_hidden_layers" in text:
            interval = text.get("full_attention_interval") or 4
            known["layer_types"] = _layer_pattern(text["num_hidden_layers"], interval)
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING} - set(known)
        if required:
            raise ValueError(f"config.json lacks {', '.join(sorted(required))}")
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        """The text-only config.json of this model, which `from_hf` reads back to an equal configuration."""
        fields = dataclasses.asdict(self)
        for name in ("matmul_precision", "rope_theta", "partial_rotary_factor"):
            del fields[name]
        if self.attention_window is None:
            del fields["attention_window"]
        eos = self.eos_token_id
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **fields,
            "layer_types": list(self.layer_types),
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "hidden_act": "silu",
            "attention_bias": False,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
        }

    @classmethod
    def qwen35_0_8b(cls) -> Self:
        """Qwen3.5-0.8B: 18 gated DeltaNet layers of 16 heads, one value head per key head."""
        return cls(hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
                   num_key_value_heads=2, linear_num_value_heads=16, tie_word_embeddings=True, **_PUBLIC)  # fmt: skip

    @classmethod
    def qwen35_2b(cls) -> Self:
        """Qwen3.5-2B: 18 gated DeltaNet layers of 16 heads, one value head per key head."""
        return cls(hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8,
                   num_key_value_heads=2, linear_num_value_heads=16, tie_word_embeddings=True, **_PUBLIC)  # fmt: skip

    @classmethod
    def qwen35_4b(cls) -> Self:
        """Qwen3.5-4B: 24 gated DeltaNet layers of 32 value heads, two to a key head."""
        return cls(hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16,
                   num_key_value_heads=4, linear_num_value_heads=32, tie_word_embeddings=True, **_PUBLIC)  # fmt: skip

    @classmethod
    def qwen35_9b(cls) -> Self:
        """Qwen3.5-9B: 24 gated DeltaNet layers of 32 value heads, two to a key head."""
        return cls(hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
                   num_key_value_heads=4, linear_num_value_heads=32, **_PUBLIC)  # fmt: skip

    @classmethod
    def qwen35_27b(cls) -> Self:
        """Qwen3.5-27B: 48 gated DeltaNet layers of 48 value heads, three to a key head."""
        return cls(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
                   num_key_value_heads=4, linear_num_value_heads=48, **_PUBLIC)  # fmt: skip


_PUBLIC: dict[str, Any] = {"dtype": "bfloat16", "eos_token_id": (248044,)}


def _layer_pattern(num_layers: int, interval: int) -> tuple[str, ...]:
    """Every `interval`-th layer is full attention, the last of each group."""
    return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))
