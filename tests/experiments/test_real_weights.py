"""A directory as Qwen3.5 is published (multimodal layout, shards, tokenizer.json), through accuracy, scoring and lm-eval."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from experiments import accuracy, accuracy_report, corpus, prompts, scoring, streams, tasks, tokenization
from models import qwen35

FIXTURE = Path(__file__).resolve().parents[1] / "data" / "qwen35" / "tiny_a_wrapped"
VOCABULARY = 300
pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The fixture with a byte-level BPE tokenizer, as Qwen's is, that has learnt a few dozen merges."""
    path = tmp_path_factory.mktemp("real") / "Qwen3.5-tiny"
    shutil.copytree(FIXTURE, path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([corpus.load_held_out_text()[:50_000].tobytes().decode(errors="ignore")], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    fields = json.loads((path / "config.json").read_text())
    (fields.get("text_config") or fields)["eos_token_id"] = 0
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="module")
def reader(directory):
    config, model = qwen35.from_pretrained(directory)
    return scoring.Reader(
        model, tokenization.load_tokenizer(directory, config), "exact", max_length=256, stop_tokens=(0,)
    )


def test_accuracy_end_to_end(directory, tmp_path):
    settings = accuracy.Settings(
        model_dir=str(directory), methods=("window-bf16",), num_streams=1, num_tokens=256, segment=128,
        output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    text = accuracy.run(settings)
    assert "NLL in nats per token" in text
    results = accuracy_report.Results.read(tmp_path / "run")
    assert results.config["tokenizer"] == f"tokenizer.json, {VOCABULARY} tokens"
    assert results.one("quality", "exact", group=streams.TEXT)["tokens"] == 255
    assert results.find("state_error", "window-bf16")[-1]["mean"] > 0


def test_prompts_go_through_the_tokenizer(directory):
    tokenizer = tokenization.load_tokenizer(directory, qwen35.from_pretrained(directory)[0])
    tokens = prompts.make_prompts(("prose", "recall"), 256, tokenizer)
    assert tokens.shape == (2, 256) and (tokens[:, 0] == tokenizer.prefix).all() and tokens.max() < VOCABULARY
    text = tokenizer.decode(tokens[0, 1:].tolist())
    prose = prompts.documents("prose").tobytes().decode(errors="ignore").replace("\0", "\n")
    assert len(text) > 256 and text[:100].strip() in prose


def test_streams_through_a_tokenizer(reader):
    """Streams are text again when decoded; an answer's tokens are those that hold its value, written `age` before."""
    tokenizer = reader.tokenizer
    made = streams.make_streams(2, 2048, 0, tokenizer=tokenizer)
    assert made.tokens.shape == (4, 2048) and (made.tokens[:, 0] == 0).all() and made.tokens.max() < VOCABULARY
    held_out = corpus.load_held_out_text().tobytes().decode(errors="ignore").replace("\0", "\n\n")
    assert tokenizer.decode(made.tokens[0].tolist())[100:1000] in held_out
    answers = made.answers
    assert set(answers.stream) == {2, 3} and len(answers) > 20
    seen = 0
    for i in np.flatnonzero(answers.kind == tasks.KINDS.index("register")):
        row, first = made.tokens[answers.stream[i]], answers.position[i]
        value = tokenizer.decode(row[first : first + answers.length[i]].tolist())
        written = tokenizer.decode(row[first - answers.age[i] :][:2].tolist())
        before = tokenizer.decode(row[first - 12 : first].tolist())
        assert "get " in before and any(value.strip("=;\n")[:1] in part for part in (written,)), (
            before,
            value,
            written,
        )
        seen += 1
    assert seen > 5


def test_a_tokenizer_of_another_model(directory, tmp_path):
    config = qwen35.Config.from_hf(json.loads((directory / "config.json").read_text()))
    small = qwen35.Config.from_hf({**config.to_hf(), "vocab_size": 280})
    with pytest.raises(ValueError, match=r"has tokens up to 299.* vocabulary has 280"):
        tokenization.load_tokenizer(directory, small)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer of the tokenizers library"):
        tokenization.load_tokenizer(tmp_path, config)
    (tmp_path / "tokenizer.json").unlink()
    assert isinstance(tokenization.load_tokenizer(tmp_path, config), tokenization.ByteTokenizer)
    with pytest.raises(ValueError, match=r"no tokenizer\.json, and a vocabulary of 100 is too small"):
        tokenization.load_tokenizer(tmp_path, qwen35.Config.from_hf({**config.to_hf(), "vocab_size": 100}))


def test_byte_tokenizer():
    tokenizer = tokenization.ByteTokenizer()
    ids, starts = tokenizer.encode_with_starts("aé€b")
    assert tokenizer.decode([tokenizer.prefix, *ids]) == "aé€b" and starts == [0, 1, 1, 2, 2, 2, 3]


def log_likelihood(model, context, continuation):
    """By one forward pass over the whole text."""
    tokens = jnp.asarray([[*context, *continuation]])
    cache = qwen35.init_cache(model.config, batch=1, max_length=tokens.shape[1])
    logits, _ = qwen35.prefill(model, tokens, cache)
    log_p = np.asarray(jax.nn.log_softmax(logits[0, len(context) - 1 : -1]))
    greedy = (log_p.argmax(-1) == np.array(continuation)).all()
    return log_p[np.arange(len(continuation)), continuation].sum(), bool(greedy)


def test_scores(reader):
    """Of a ragged batch: those of one forward pass; a text's greedy continuation is seen to be greedy."""
    pairs = [([0, 5, 6, 7, 8], [9, 10, 11]), ([0], [70, 71]), ([0, *range(20, 90)], [3])]
    for score, (context, continuation) in zip(reader.score(pairs), pairs, strict=True):
        total, greedy = log_likelihood(reader.model, context, continuation)
        assert score.log_likelihood == pytest.approx(total, rel=1e-3) and score.is_greedy == greedy
    with pytest.raises(ValueError, match="context of at least one token"):
        reader.score([([], [1])])


def test_generation_stops(reader):
    """At a stop string, which is cut off, at max_tokens, and at the end of the text; chunks do not show."""
    prompts = [[0, 40, 41, 42], [0, 50]]
    whole, other = reader.generate(prompts, max_tokens=8, chunk=8)
    assert whole and reader.generate(prompts, max_tokens=8, chunk=4) == [whole, other]
    stop = whole[3:5]
    assert reader.generate(prompts, max_tokens=8, until=[stop], chunk=4)[0] == whole[: whole.find(stop)]
    with pytest.raises(ValueError, match="max_tokens must lie in"):
        reader.generate(prompts, max_tokens=256)


def test_pieces_of_text(reader):
    tokenizer = reader.tokenizer
    context, continuation = scoring.split_continuation(tokenizer, "def main ", "return x")
    assert context == [0, *tokenizer.encode("def main")] and tokenizer.decode(continuation) == " return x"
    assert scoring.split_continuation(tokenizer, "", "abc")[0] == [0]
    parts = scoring.windows(list(range(1, 11)), 0, 5)
    assert parts == [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([8], [9, 10])]
    assert scoring.windows([], 0, 5) == []
    assert scoring.cut_text("a. b\n\nc", ["\n\n", ". "]) == "a" and scoring.cut_text("abc", ["", "x"]) == "abc"


def test_the_harness(directory):
    """The adapter inside lm-eval, which finds it by name; every entry of its interface."""
    pytest.importorskip("lm_eval", reason="the lm-eval extra is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    from experiments import lm_eval_adapter

    model = get_model("leapquant").create_from_arg_obj(
        {"model_dir": str(directory), "method": "window-bf16", "max_length": 128, "dtype": "float32"},
        {"batch_size": 2, "device": None, "max_batch_size": None},
    )
    assert isinstance(model, lm_eval_adapter.LeapQuantLM)

    def requests(kind, *arguments):
        return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]

    text = "some text of a few tokens"
    scores = model.loglikelihood(requests("loglikelihood", ("a b", " c"), ("", text)))
    assert all(total < 0 and isinstance(greedy, bool) for total, greedy in scores)
    (rolling,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert rolling == pytest.approx(scores[1][0], rel=1e-3)
    options = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    texts = model.generate_until(requests("generate_until", ("a", options), ("b", options), ("c", {"max_gen_toks": 2})))
    assert len(texts) == 3 and "\n" not in texts[0] + texts[1]
    with pytest.raises(ValueError, match=r"unknown model_args \['metod'\]"):
        lm_eval_adapter.LeapQuantLM(str(directory), metod="exact")
    assert lm_eval_adapter.generation_options({"until": "x", "max_tokens": 3}, 9) == (3, ["x"], None)
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    assert lm_eval_adapter.generation_options(sampled, 9)[2] == qwen35.TopP(0.95, 0.6)
    with pytest.raises(ValueError, match="has no chat template"):
        model.apply_chat_template([])
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    chat = [{"role": "user", "content": "1 + 1"}]
    assert model.apply_chat_template(chat) == "<|im_start|>user: 1 + 1<|im_end|>"
    assert model.apply_chat_template(chat, add_generation_prompt=False) == "<|im_start|>user: 1 + 1"
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 0]}')
    assert lm_eval_adapter.stop_tokens(directory, model.reader.model.config) == (0, 3)
    with pytest.raises(ValueError, match="not supported"):
        lm_eval_adapter.generation_options({"num_beams": 4}, 9)
