"""Recall streams, checked by an interpreter of the commands that knows nothing of how they are made."""

import re

import numpy as np
import pytest

from experiments import corpus, tasks

COMMAND = re.compile(
    rb"^(?:set (?P<set>\w\d)=(?P<value>[0-9a-f]{2})|get (?P<get>\w\d)=(?P<got>[0-9a-f]{2})"
    rb"|let (?P<let>[a-h])=(?P<start>\d)|(?P<change>up|dn) (?P<counter>[a-h])|at (?P<at>[a-h])=(?P<count>\d)"
    rb"|mem (?P<mem>[a-z]):(?P<string>[a-z]{8})|say (?P<say>[a-z]):(?P<said>[a-z]{8})"
    rb"|ptr (?P<ptr>\w\d)>(?P<target>\w\d)|via (?P<via>\w\d)>(?P<reached>\w\d=[0-9a-f]{2})"
    rb"|bit=(?P<bit>\d)|(?P<flip>flip)|odd=(?P<odd>\d));$"
)


@pytest.fixture(scope="module")
def streams() -> tasks.RecallStreams:
    return tasks.recall_streams(3, 20_000, seed=5, max_age=4096)


def interpret(tokens: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Reads a stream and returns (position, length, age, kind) of every question, checking that its answer is right."""
    data = bytes(np.where(tokens < 256, tokens, 0).astype(np.uint8))
    registers, writes, counters, strings, pointers, bit = {}, {}, {}, {}, {}, (0, 0)
    found, position = [], 0
    for line in data.split(b"\n"):
        match = COMMAND.match(line[1:] if position == 0 else line)
        start, position = position, position + len(line) + 1
        if not match or position > len(data):
            continue
        command = {name: value.decode() for name, value in match.groupdict().items() if value is not None}

        def answer(kind: str, question: int, length: int, written: int, start: int = start) -> None:
            found.append((start + question, length, start + question - written, tasks.KINDS.index(kind)))

        if key := command.get("set"):
            assert registers.get(key, ("", 0))[0] != command["value"]
            registers[key] = (command["value"], start + 7)
            writes[key] = writes.get(key, 0) + 1
        elif key := command.get("get"):
            value, written = registers[key]
            assert command["got"] == value
            answer("register" if writes[key] == 1 else "overwritten", 7, 2, written)
        elif name := command.get("let"):
            counters[name] = (int(command["start"]), start + 6)
        elif name := command.get("counter"):
            value, written = counters[name]
            counters[name] = (value + (1 if command["change"] == "up" else -1), written)
            assert 0 <= counters[name][0] <= 7
        elif name := command.get("at"):
            value, written = counters[name]
            assert int(command["count"]) == value
            answer("counter", 5, 1, written)
        elif label := command.get("mem"):
            strings[label] = (command["string"], start + 6)
        elif label := command.get("say"):
            string, written = strings.pop(label)
            assert command["said"] == string
            answer("copy", 6, 8, written)
        elif key := command.get("ptr"):
            pointers[key] = command["target"]
        elif key := command.get("via"):
            target = pointers.pop(key)
            value, written = registers[target]
            assert command["reached"] == f"{target}={value}"
            answer("chain", 7, 5, written)
        elif value := command.get("bit"):
            bit = (int(value), start + 4)
        elif "flip" in command:
            bit = (1 - bit[0], bit[1])
        else:
            assert int(command["odd"]) == bit[0]
            answer("parity", 4, 1, bit[1])
    return found


def test_answers_are_what_an_interpreter_finds(streams):
    answers = streams.answers
    for index in range(3):
        of_stream = answers.stream == index
        expected = interpret(streams.tokens[index])
        fields = (answers.position, answers.length, answers.age, answers.kind)
        assert [tuple(int(field[i]) for field in fields) for i in np.flatnonzero(of_stream)] == expected
    assert set(answers.kind) == set(range(len(tasks.KINDS)))


def test_only_answers_are_scored(streams):
    scored = np.zeros(streams.tokens.shape, int)
    for i in range(len(streams.answers)):
        position, length = streams.answers.position[i], streams.answers.length[i]
        scored[streams.answers.stream[i], position : position + length] = streams.answers.age[i]
    np.testing.assert_array_equal(streams.age, scored)
    np.testing.assert_array_equal(streams.score, scored > 0)
    kinds = streams.task[streams.answers.stream, streams.answers.position + streams.answers.length - 1]
    np.testing.assert_array_equal(kinds, 1 + streams.answers.kind)
    lengths = [tasks.LENGTHS[tasks.KINDS[kind]] for kind in streams.answers.kind]
    np.testing.assert_array_equal(streams.answers.length, lengths)


def test_streams_depend_on_the_seed_alone(streams):
    again = tasks.recall_streams(3, 20_000, seed=5, max_age=4096)
    np.testing.assert_array_equal(streams.tokens, again.tokens)
    assert (tasks.recall_streams(3, 20_000, seed=6, max_age=4096).tokens != streams.tokens).any()
    assert (streams.tokens[:, 0] == corpus.BOS).all() and streams.tokens.dtype == np.int32


def test_ages_spread_over_the_octaves():
    streams = tasks.recall_streams(4, 32_768, seed=5, max_age=4096)
    rows = tasks.accuracy_by_age(streams.answers, np.ones(len(streams.answers), bool))
    counts = {(row["kind"], row["min_age"]): row["count"] for row in rows}
    gated = set(tasks.KINDS) - set(tasks.CONTROLS)
    for kind in gated:
        assert all(counts[kind, octave] >= 5 for octave in (256, 512, 1024, 2048)), (kind, counts)
    young, old = (sum(counts[kind, octave] for kind in gated) for octave in (256, 2048))
    assert young < old
    data = b"\n".join(bytes(np.minimum(row, 255).astype(np.uint8)) for row in streams.tokens)
    share = sum(len(line) + 1 for line in data.split(b"\n") if COMMAND.match(line)) / streams.tokens.size
    assert 0.22 < share < 0.27


def test_grade_wants_every_token_of_an_answer(streams):
    assert tasks.grade(streams, streams.tokens).all()
    (copy, *_) = np.flatnonzero(streams.answers.length == 8)
    for token in range(8):
        wrong = streams.tokens.copy()
        wrong[streams.answers.stream[copy], streams.answers.position[copy] + token] += 1
        correct = tasks.grade(streams, wrong)
        assert not correct[copy] and np.delete(correct, copy).all()
    rows = tasks.accuracy_by_age(streams.answers, correct)
    assert sum(row["count"] for row in rows) == len(streams.answers)
    assert sum(row["correct"] for row in rows) == len(streams.answers) - 1


def test_a_mix_of_one_kind():
    only = tasks.recall_streams(1, 4000, seed=1, mix={"register": 1.0}, max_age=1024)
    assert set(only.answers.kind) == {tasks.KINDS.index("register")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": {"stack": 1.0}}, "mix"),
        ({"mix": {"register": 0.0}}, "mix"),
        ({"synthetic_share": 0.9}, "synthetic_share"),
        ({"min_age": 64, "max_age": 32}, "Ages"),
        ({"num_tokens": 10}, "num_tokens"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        tasks.recall_streams(**{"num_streams": 1, "num_tokens": 1000, **options})
