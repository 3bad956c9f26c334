"""`python -m tests.agents.record`: record a session of each agent for `bench.serving.sessions`.

Two questions are asked, and answered after twenty calls or more: files are read, edited, commands
run, two calls made at once, some fail, and twice a sub-agent works in between.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports MLX

from bench.serving import sessions  # noqa: E402
from engine.model.demo import demo_model_path  # noqa: E402
from tests.agents.formats import FORMATS, Step  # noqa: E402
from tests.agents.installing import binaries  # noqa: E402
from tests.agents.model import MODEL, Script, make_actor  # noqa: E402
from tests.agents.recorder import Request, recording  # noqa: E402
from tests.agents.scripts import AGENTS, PLAIN, Agent, Tools, aider_edit  # noqa: E402
from tests.agents.trial import Trial  # noqa: E402
from tests.e2e.server import serving  # noqa: E402

QUESTIONS = ("Number the lines of notes.txt.", "Now take the numbers out again, please.")
HELPERS = ("List what is in this directory.", "Find each file that has a number.")
_LINES = [
    "This one begins the file, and is not the longest.",
    "It says little, and that is what it is for.",
    "Here is one with more words than the one before it, though with fewer than the next.",
    "What comes first is read first, and what comes last is what a reader remembers of it all.",
    "A short one.",
    "Of six lines this is the fifth but one from the end of nothing in particular.",
    "The last line ends the file.",
]
_EDITS = {f"Give number {number} to its line.": line for number, line in enumerate(_LINES, 1)}
"""What aider is asked, one after the other. The first of two edits is wrong: it tells the model."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents.record", description=__doc__)
    parser.add_argument("--only", default="", help="agents whose names match this expression")
    parser.add_argument("--keep", type=Path, required=True, help="where the agents are installed")
    options = parser.parse_args()
    for agent in AGENTS:
        if re.search(options.only, agent.name):
            with tempfile.TemporaryDirectory(prefix="record-") as private:
                _record(agent, binaries(agent, options.keep), Path(private))
    return 0


def _record(agent: Agent, found: Path, private: Path) -> None:
    model = make_actor(
        private / "model",
        demo_model_path(),
        _scripts(agent, f"{private}/project"),
        PLAIN,
        FORMATS[0],
    )
    names = ("--served-model-name", MODEL, "--no-ssd", "--reasoning-key", sessions.REASONING_KEY)
    with serving(model, *names) as server, recording(server.port) as recorder:
        trial = Trial(agent, found, private, server)
        trial.lay_out("".join(f"{line}\n" for line in _LINES))
        for arguments, typed in _runs(agent):
            code, printed = trial.work(recorder.url, arguments, typed)
            print(f"{agent.name}: {code}, {len(recorder.requests)} requests\n{printed[-1500:]}")
    requests = [sessions.Request(_line(each), *each) for each in recorder.requests]
    sessions.write(agent.name, requests, {str(private): "/home/user"})


def _runs(agent: Agent) -> Iterator[tuple[list[str], str]]:
    """Yield the arguments of each run of the agent, and what it reads."""
    if agent.go_on is None:
        words = agent.arguments("")
        yield words[: words.index("--message")] + words[-1:], "".join(f"{q}\n" for q in _EDITS)
    else:
        yield agent.arguments(QUESTIONS[0]), ""
        yield agent.go_on(QUESTIONS[1]), ""


def _line(request: Request) -> str:
    """Return the conversation that ``request`` belongs to."""
    text = str(request.body)
    for number, helper in enumerate(HELPERS):
        if helper in text and QUESTIONS[0] not in text:
            return f"sub-agent {number + 1}"
    by_aider = any("SEARCH" in str(m) for m in request.body.get("messages", ())[:1])
    return "main" if "tools" in request.body or by_aider else "other"


def _scripts(agent: Agent, project: str) -> list[Script]:
    if agent.tools is None:
        return [
            Script(
                question,
                [
                    Step(text="So be it.\n\n" + aider_edit(f"{line} Not so.", line)),
                    Step(text="So then.\n\n" + aider_edit(line, f"{number}. {line}")),
                ],
                with_tools=False,
            )
            for number, (question, line) in enumerate(_EDITS.items(), 1)
        ]
    tools = agent.tools(project)
    return [
        Script(QUESTIONS[0], [*_first(tools), Step(text="Its lines have numbers.")]),
        Script(QUESTIONS[1], [*_second(tools), Step(text="The numbers are gone.")]),
        *(
            Script(
                helper,
                [
                    Step((tools.run("ls -la"),), reasoning="I look around."),
                    Step((tools.read("notes.txt"), tools.run("grep -c 1 notes.txt"))),
                    Step(text="There is notes.txt, and nothing else."),
                ],
            )
            for helper in HELPERS
        ),
    ]


def _first(tools: Tools) -> Sequence[Step]:
    """Twelve turns, and a sub-agent's."""
    edits = [
        Step((tools.edit("notes.txt", line, f"{number}. {line}"),), f"Line {number} is next.")
        for number, line in enumerate(_LINES, 1)
    ]
    return [
        Step((tools.read("notes.txt"), tools.run("wc notes.txt")), reasoning="I read it first."),
        Step((tools.read("not-there.txt"),), reasoning="Is there another?"),
        *(Step((call,), reasoning="Let another look.") for call in tools.delegate(HELPERS[0])),
        *edits,
        Step((tools.run("cat -n notes.txt"),), reasoning="Is it as it should be?"),
    ]


def _second(tools: Tools) -> Sequence[Step]:
    """Eight turns, and another sub-agent's."""
    return [
        Step((tools.run("grep -n '^[0-9]' notes.txt"),), reasoning="Which lines have one?"),
        *(Step((call,), reasoning="Let another look.") for call in tools.delegate(HELPERS[1])),
        Step((tools.read("notes.txt"),)),
        *(
            Step((tools.edit("notes.txt", f"{number}. {line}", line),), f"Line {number} again.")
            for number, line in enumerate(_LINES[:4], 1)
        ),
        Step((tools.run("sed -i 's/^[0-9]*[.] //' notes.txt; cat notes.txt"),)),
    ]


if __name__ == "__main__":
    sys.exit(main())
