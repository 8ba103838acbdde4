"""Talk to a model fine-tuned on XTML chats. Thinking is shown dimmed; calls are shown and never executed.

  tercet chat runs/sft
  tercet chat runs/sft --effort none --system "You are terse." --temperature 0.6
  tercet chat runs/sft --tools tools.json      you type the tools' results

In the chat: /new starts over, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tercet.data.chat import Completion, Conversation, Delta, Message
    from tercet.data.tokenizer import Tokenizer
    from tercet.serve.generate import Sampler

Show = Callable[[str, bool], None]
"""Prints text, dimmed or not, without a newline of its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--effort", default="max", choices=("low", "high", "max", "none"), help="none: no thinking")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tool declarations")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="tokens an answer at most (default 2048)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default 1.0)")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus to draw from (default 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same chat (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto (default cpu)")


def run(args: argparse.Namespace) -> None:
    """Load the run and chat until the input ends."""
    from rich.console import Console

    from tercet.data.chat.syntax import marker_ids
    from tercet.errors import ConfigError
    from tercet.serve.generate import Generator
    from tercet.train.checkpoint import load_run

    if args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; it must be at least 1")
    options = _options(args)
    loaded = load_run(args.run, device=args.device)
    marker_ids(loaded.tokenizer)
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def show(text: str, dim: bool) -> None:
        console.print(visible(text), end="", style="dim" if dim else None)
        console.file.flush()

    Chat(Generator(loaded.model), loaded.tokenizer, args, options, show).loop(_ask)


def _options(args: argparse.Namespace) -> Conversation:
    """Return the conversation before its first message: system text, tools and effort, checked like a request."""
    import dataclasses
    import json

    from tercet.data.chat import conversation_from
    from tercet.errors import DataError

    tools: Any = None
    if args.tools:
        try:
            with open(args.tools, encoding="utf-8") as handle:
                tools = json.load(handle)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read the tools {args.tools}: {error}; give a JSON list of declarations") from error
    request = {
        "messages": [{"role": "system", "content": args.system}],
        "tools": tools,
        "reasoning_effort": args.effort,
    }
    conversation = conversation_from(request)
    return conversation if args.system else dataclasses.replace(conversation, messages=())


def _ask(prompt: str) -> str:
    """Read one line; a prompt appears only where a person types."""
    from tercet.errors import DataError

    try:
        line = input(prompt) if sys.stdin.isatty() else input()
    except UnicodeDecodeError as error:
        raise DataError(f"the input is not UTF-8 ({error.reason} at byte {error.start})") from error
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def visible(text: str) -> str:
    """Replace control characters, so that a model cannot send escape sequences to the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 0x9F else "\ufffd" for c in text)


class Chat:
    """The conversation so far and the way to continue it."""

    def __init__(
        self, sampler: Sampler, tokenizer: Tokenizer, args: argparse.Namespace, options: Conversation, show: Show
    ) -> None:
        """Chat with *sampler* from the messages of *options*; *args* brings the sampling flags."""
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.args = args
        self.options = options
        self.show = show
        self.messages: list[Message] = list(options.messages)
        self._answers = 0
        self._calls = 0

    def loop(self, ask: Callable[[str], str]) -> None:
        """Ask, answer, until *ask* raises EOFError or the person leaves."""
        from tercet.data.chat import Message

        while True:
            try:
                line = ask("\n> ")
                if line.strip() == "/exit":
                    return
                if line.strip() == "/new":
                    self.messages = list(self.options.messages)
                    self.show("started over\n", True)
                    continue
                if not line.strip():
                    continue
                self.messages.append(Message("user", line))
                while self.answer() and self._ask_results(ask):
                    pass
            except EOFError:
                return

    def answer(self) -> bool:
        """Generate one assistant message, show it as it comes and keep it; returns whether it calls tools."""
        import dataclasses

        from tercet.data.chat import Parser, encode, render
        from tercet.serve.generate import Sampling

        prompt = render(dataclasses.replace(self.options, messages=tuple(self.messages)))
        ids = encode(prompt.segments, self.tokenizer).ids
        parser = Parser(self.tokenizer, start=prompt.start, tools=prompt.tools)
        sampling = Sampling(
            temperature=self.args.temperature, top_p=self.args.top_p, seed=self.args.seed + self._answers
        )
        self._answers += 1
        stream = self.sampler.stream(ids, sampling, max_new_tokens=self.args.tokens, stop_ids=self.tokenizer.stop_ids)
        screen, interrupted = _Screen(self.show), False
        try:
            for token in stream:
                screen.put(parser.feed(token))
                if parser.done:
                    break
        except KeyboardInterrupt:
            interrupted = True
        completion = parser.finish(stopped=interrupted)
        screen.put(list(completion.deltas))
        self._close_answer(completion, screen, interrupted)
        return bool(completion.calls)

    def _close_answer(self, completion: Completion, screen: _Screen, interrupted: bool) -> None:
        first, self._calls = self._calls, self._calls + len(completion.calls)
        self.messages.append(completion.as_message([f"call_{n}" for n in range(first, self._calls)]))
        screen.end_line()
        if interrupted:
            self.show("stopped\n", True)
        elif completion.finish_reason == "length":
            self.show(
                f"cut off after {self.args.tokens} tokens; raise --tokens (a model that was not fine-tuned on chats "
                "never ends its answer)\n",
                True,
            )

    def _ask_results(self, ask: Callable[[str], str]) -> bool:
        """Let the person play the tools; an empty line gives no result and returns to the chat."""
        from tercet.data.chat import Message

        self.show("nothing is executed; type the results, or an empty line to go on without\n", True)
        given = []
        for call in self.messages[-1].calls:
            line = ask(f"result of {visible(call.name)}> ")
            if not line.strip():
                break
            given.append(Message("tool", line, call_id=call.id))
        self.messages += given
        return bool(given)


class _Screen:
    """Shows deltas: reasoning dimmed, the response plain, calls on lines of their own."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._kind: type[Delta] | None = None
        self._at_start = True

    def put(self, deltas: list[Delta]) -> None:
        from tercet.data.chat import ArgumentsDelta, CallEnd, CallStart, ReasoningDelta

        for delta in deltas:
            if isinstance(delta, CallEnd):
                self._write(")\n", True)
            elif isinstance(delta, CallStart):
                self.end_line()
                self._write(f"calls {delta.name}(", True)
            elif isinstance(delta, ArgumentsDelta):
                self._write(delta.text, True)
            else:
                if self._kind is not None and self._kind is not type(delta):
                    self.end_line()
                self._write(delta.text, isinstance(delta, ReasoningDelta))
            self._kind = type(delta)

    def _write(self, text: str, dim: bool) -> None:
        self._show(text, dim)
        self._at_start = text.endswith("\n")

    def end_line(self) -> None:
        """Begin a new line unless the cursor is at the start of one."""
        if not self._at_start:
            self._write("\n", False)
