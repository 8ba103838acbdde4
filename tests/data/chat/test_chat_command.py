"""``tercet chat`` with a scripted sampler in place of a model."""

import argparse
import json
from types import SimpleNamespace

import pytest
from chat_kit import TOOL, tokens

from tercet.cli import chat
from tercet.cli.main import main
from tercet.data.chat import Conversation, Message


class Scripted:
    """Plays given outputs; an exception class in a script is raised there."""

    def __init__(self, tokenizer, *outputs) -> None:
        self.tokenizer = tokenizer
        self.outputs = list(outputs)
        self.prompts: list[str] = []
        self.seeds: list[int] = []

    def stream(self, ids, sampling, *, max_new_tokens, stop_ids=()):
        self.prompts.append(self.tokenizer.decode(ids))
        self.seeds.append(sampling.seed)
        for piece in self.outputs.pop(0):
            if not isinstance(piece, str):
                raise piece
            for token in tokens(piece, self.tokenizer)[:max_new_tokens]:
                yield token
                if token in stop_ids:
                    return


def talk(tokenizer, lines, *outputs, conversation=None, tokens=1000) -> tuple[chat.Chat, Scripted, str]:
    """Run a chat over *lines*; returns it, its sampler and the screen with dimmed text in braces."""
    screen: list[str] = []
    sampler = Scripted(tokenizer, *outputs)
    args = argparse.Namespace(temperature=1.0, top_p=0.9, seed=5, tokens=tokens)
    loop = chat.Chat(
        sampler,
        tokenizer,
        args,
        conversation or Conversation((), effort="low"),
        lambda text, dim: screen.append(f"{{{text}}}" if dim else text),
    )
    script = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(script)
        except StopIteration:
            raise EOFError from None

    loop.loop(ask)
    return loop, sampler, "".join(screen).replace("}{", "")


ANSWER = "<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"

INSTRUCT = ANSWER.partition("response<|sep|>")[2]


def test_turns_extend_the_prompt(byte_tokenizer) -> None:
    """The second prompt begins with the first and its answer, so cached state is used; reasoning is sent back."""
    loop, sampler, screen = talk(byte_tokenizer, ["one", "", "two", "/exit", "never"], ["hm", ANSWER], [ANSWER])
    assert screen.startswith("{hm}\nyes\n")
    assert sampler.prompts[1].startswith(sampler.prompts[0] + "hm" + ANSWER)
    assert sampler.seeds == [5, 6]
    assert [m.role for m in loop.messages] == ["user", "assistant", "user", "assistant"]
    assert loop.messages[1].reasoning == "hm"


def test_new_keeps_the_system_message(byte_tokenizer) -> None:
    start = Conversation((Message("system", "s"),), effort=None)
    loop, sampler, _ = talk(byte_tokenizer, ["one", "/new", "two"], [INSTRUCT], [INSTRUCT], conversation=start)
    assert [m.text for m in loop.messages] == ["s", "two", "yes"]
    assert "one" not in sampler.prompts[1]


CALLS = (
    "<|open|>tools<|sep|>"
    + "".join(
        f'<|open|>call tool="f{n}" index="{n}"<|sep|><|open|>argument key="k" type="number"<|sep|>{n}'
        "<|close|>argument<|sep|><|close|>call<|sep|>"
        for n in (1, 2)
    )
    + "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


def test_calls_are_shown_and_answered_by_hand(byte_tokenizer) -> None:
    conversation = Conversation((), tools=(TOOL,))
    loop, sampler, screen = talk(byte_tokenizer, ["go", "r1", "r2"], ["t", CALLS], [ANSWER], conversation=conversation)
    assert 'calls f1({"k": 1})\ncalls f2({"k": 2})\nnothing is executed' in screen.replace("}\n{", "\n")
    assert '<|open|>message role="tool" tool="f2" index="2"<|sep|>r2<|close|>' in sampler.prompts[1]
    assert [m.role for m in loop.messages] == ["user", "assistant", "tool", "tool", "assistant"]


def test_an_empty_result_returns_to_the_chat(byte_tokenizer) -> None:
    conversation = Conversation((), tools=(TOOL,))
    loop, _, _ = talk(byte_tokenizer, ["go", "", "on"], [CALLS], [ANSWER], conversation=conversation)
    assert [m.role for m in loop.messages] == ["user", "assistant", "user", "assistant"]


def test_ctrl_c_stops_the_answer_only(byte_tokenizer) -> None:
    loop, _, screen = talk(byte_tokenizer, ["a", "b"], ["half", KeyboardInterrupt()], [ANSWER])
    assert "{stopped\n}" in screen
    assert loop.messages[1].reasoning == "half"
    assert loop.messages[3].text == "yes"


def test_length_limit_is_said(byte_tokenizer) -> None:
    _, _, screen = talk(byte_tokenizer, ["a"], ["thinking on and on"], tokens=5)
    assert screen.startswith("{think}\n{cut off after 5 tokens; raise --tokens")


def test_escape_sequences_do_not_reach_the_terminal() -> None:
    assert chat.visible("a\x1b[2J\x9b\x07\r\n\té🙂") == "a\ufffd[2J\ufffd\ufffd\ufffd\n\té🙂"


@pytest.fixture
def run_with(monkeypatch, byte_tokenizer):
    """Run the verb with a fake run and a scripted sampler, standard input from lines."""

    def go(arguments, lines, *outputs) -> tuple[int, Scripted]:
        import tercet.serve.generate as generate
        import tercet.train.checkpoint as checkpoint

        sampler = Scripted(byte_tokenizer, *outputs)
        loaded = SimpleNamespace(model=None, tokenizer=byte_tokenizer)
        monkeypatch.setattr(checkpoint, "load_run", lambda path, device: loaded)
        monkeypatch.setattr(generate, "Generator", lambda model: sampler)
        script = iter(lines)

        def line(*_: str) -> str:
            try:
                return next(script)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", line)
        return main(["chat", "RUN", *arguments]), sampler

    return go


def test_the_verb(run_with, tmp_path, capsys) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]), encoding="utf-8")
    code, sampler = run_with(
        ["--effort", "low", "--system", "s", "--tools", str(tools)], ["\udcffhi"], ["hm", ANSWER]
    )  # fmt: skip
    assert code == 0
    assert "hm\nyes\n" in capsys.readouterr().out
    assert '"tool-declare"' in sampler.prompts[0]
    assert "`thinking_effort=low`" in sampler.prompts[0]
    assert 'role="user"<|sep|>\ufffdhi<|close|>' in sampler.prompts[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens is 0"),
        (["--tools", "no/such.json"], "cannot read the tools"),
        (["--temperature", "-1"], "temperature is -1"),
    ],
)
def test_bad_flags(run_with, capsys, arguments, message) -> None:
    code, _ = run_with(arguments, ["hi"], [ANSWER])
    assert code == 2
    assert message in capsys.readouterr().err


def test_bad_tools_file(run_with, tmp_path, capsys) -> None:
    bad = tmp_path / "tools.json"
    bad.write_text('[{"type": "function"}]', encoding="utf-8")
    assert run_with(["--tools", str(bad)], [])[0] == 2
    assert "tools[0].function" in capsys.readouterr().err
    bad.write_bytes(b"\xff")
    assert run_with(["--tools", str(bad)], [])[0] == 2
