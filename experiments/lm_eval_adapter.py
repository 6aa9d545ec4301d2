"""The lm-evaluation-harness on models of this repository, with a chosen way to store their recurrent states.

    pip install "leapquant-jax[lm-eval]"
    python -m experiments.lm_eval_adapter --model leapquant --tasks gsm8k --batch_size 8 \\
        --model_args model_dir=Qwen3.5-0.8B,method=leapquant-int8

All flags are those of `lm_eval`; this program only adds the model type "leapquant", whose arguments are those of
`LeapQuantLM`. The method `exact` gives the fp32 baseline. Tasks read their data as the harness does.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

try:
    import jinja2.sandbox  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError('this adapter needs the harness: pip install "leapquant-jax[lm-eval]"') from error
from tqdm import tqdm

import leapquant_jax as lq
from experiments import scoring, tokenization
from models import qwen35
from models.checkpoints import read_json


@register_model("leapquant")
class LeapQuantLM(LM):
    """A Qwen3.5 model for the harness: see `experiments.scoring` for what is read how."""

    def __init__(
        self, model_dir: str, method: str = "leapquant-int8", batch_size: int | str = 1, max_length: int = 32768,
        max_gen_toks: int = 1024, dtype: str = "bfloat16", seed: int = 0, enable_thinking: bool = True, **unused: Any,
    ):  # fmt: skip
        """Loads a model.

        Args:
          model_dir: folder with config.json, *.safetensors, and tokenizer.json unless bytes are tokens.
          method: a name of `leapquant_jax.list_methods()`, or a policy's file (*.json).
          batch_size: requests that run side by side.
          max_length: most tokens of a context and its continuation.
          max_gen_toks: most tokens to generate when a task does not say.
          dtype: of weights and activations.
          seed: for tasks that sample.
          enable_thinking: passed to the model's chat template.
          unused: what the harness passes to every model (device, max_batch_size).

        Raises:
          ValueError: for an unknown argument or method.
        """
        super().__init__()
        unknown = set(unused) - {"device", "max_batch_size", "trust_remote_code"}
        if unknown:
            raise ValueError(f"unknown model_args {sorted(unknown)}; see LeapQuantLM for those there are")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a positive number, got {batch_size!r}")
        config, model = qwen35.from_pretrained(model_dir, dtype=dtype)
        tokenizer = tokenization.load_tokenizer(model_dir, config)
        chosen = lq.Policy.load(method) if method.endswith(".json") else lq.get_method(method)
        self.reader = scoring.Reader(model, tokenizer, chosen, int(max_length), stop_tokens(Path(model_dir), config))
        self.batch_size, self.max_gen_toks, self.seed = int(batch_size), int(max_gen_toks), int(seed)
        self.directory, self.enable_thinking = Path(model_dir), enable_thinking

    # Requests are the harness's `Instance`s; their `args` are what each entry's docstring says.

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> log likelihood of the continuation, and whether greedy decoding gives it."""
        tokenizer = self.reader.tokenizer
        pairs = [scoring.split_continuation(tokenizer, *request.args) for request in requests]
        return [(score.log_likelihood, score.is_greedy) for score in self._score(pairs, disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """(text,) -> its log likelihood, all of it read token by token."""
        tokenizer = self.reader.tokenizer
        parts = [
            scoring.windows(tokenizer.encode(request.args[0]), tokenizer.prefix, self.reader.max_length)
            for request in requests
        ]
        scores = iter(self._score([pair for windows in parts for pair in windows], disable_tqdm))
        return [sum(next(scores).log_likelihood for _ in windows) for windows in parts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """(context, options) -> the text generated after it, up to a stop string."""
        order = sorted(range(len(requests)), key=lambda i: (repr(requests[i].args[1]), len(requests[i].args[0])))
        results = [""] * len(requests)
        with tqdm(total=len(requests), desc="generating", disable=disable_tqdm) as bar:
            while order:  # batches of requests with the same options and about the same length
                options = requests[order[0]].args[1]
                batch = [i for i in order[: self.batch_size] if requests[i].args[1] == options]
                order = order[len(batch) :]
                for i, text in zip(batch, self._generate([requests[i].args[0] for i in batch], options), strict=True):
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                bar.update(len(batch))
        return results

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as the model was trained to see it, for --apply_chat_template: by its own template.

        Raises:
          ValueError: if the model's folder has none.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        text = environment.from_string(read_chat_template(self.directory)).render(
            messages=chat_history, add_generation_prompt=add_generation_prompt, enable_thinking=self.enable_thinking,
        )  # fmt: skip
        # The harness may open the answer itself, which must then not be closed.
        return text if add_generation_prompt else text.rstrip().removesuffix("<|im_end|>")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, by which the harness names its caches."""
        return read_chat_template(self.directory) if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        return self.directory.name

    def _generate(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        limit, until, sampler = generation_options(options, self.max_gen_toks)
        tokenizer = self.reader.tokenizer
        prompts = [[tokenizer.prefix, *tokenizer.encode(context)] for context in contexts]
        self.seed += 1  # another draw for each batch
        return self.reader.generate(
            prompts, max_tokens=limit, until=until, sampler=sampler, key=jax.random.key(self.seed)
        )

    def _score(self, pairs: list[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[scoring.Score]:
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]))
        results: list[scoring.Score] = [scoring.Score(0.0, True)] * len(pairs)
        for start in tqdm(range(0, len(order), self.batch_size), desc="scoring", disable=disable_tqdm):
            batch = order[start : start + self.batch_size]
            for i, score in zip(batch, self.reader.score([pairs[i] for i in batch]), strict=True):
                results[i] = score
        return results


def generation_options(options: dict[str, Any], default_limit: int) -> tuple[int, list[str], Any]:
    """(most tokens, stop strings, sampler or None) from a task's generation_kwargs.

    Raises:
      ValueError: for an option that would be ignored.
    """
    options = dict(options)
    until = options.pop("until", None) or []
    until = [until] if isinstance(until, str) else list(until)
    limits = [options.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    limit = next((int(value) for value in limits if value is not None), default_limit)
    temperature = float(options.pop("temperature", 0) or 0)
    samples = bool(options.pop("do_sample", temperature > 0))
    top_p, top_k = options.pop("top_p", None), options.pop("top_k", None)
    if options:
        raise ValueError(f"generation options {sorted(options)} are not supported: {json.dumps(options, default=str)}")
    if not samples or temperature == 0:
        return limit, until, None
    if top_p is not None and float(top_p) < 1 and top_k is not None and int(top_k) > 0:
        raise ValueError("top_p and top_k together are not supported: give one of them")
    if top_p is not None and float(top_p) < 1:
        return limit, until, qwen35.TopP(float(top_p), temperature)
    if top_k is not None and int(top_k) > 0:
        return limit, until, qwen35.TopK(int(top_k), temperature)
    return limit, until, qwen35.Temperature(temperature)


def stop_tokens(directory: Path, config: qwen35.Config) -> tuple[int, ...]:
    """Tokens that end an answer: those of config.json and of generation_config.json, which also ends a chat's turn."""
    file = directory / "generation_config.json"
    more = read_json(file).get("eos_token_id") if file.exists() else None
    more = [] if more is None else more if isinstance(more, list) else [more]
    return tuple(dict.fromkeys([*config.eos_token_id, *more]))


def read_chat_template(directory: Path) -> str:
    """The Jinja template of a model's folder.

    Raises:
      ValueError: if there is none.
    """
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    file = directory / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.exists() else None
    if not isinstance(template, str):
        raise ValueError(f"{directory} has no chat template: drop --apply_chat_template, or add chat_template.jinja")
    return template


def _refuse(message: str) -> None:
    raise ValueError(f"the chat template refuses the chat: {message}")


def main() -> None:
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()


if __name__ == "__main__":
    # Under its own name too, so that the harness and this program share one registered class.
    import sys

    sys.modules.setdefault("experiments.lm_eval_adapter", sys.modules["__main__"])
    main()
