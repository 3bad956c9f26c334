"""README.md's flag reference is made of the declarations in `shared.settings`.

`python -m tests.test_readme` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from shared.flags import Flag, flags_of
from shared.settings import Settings

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- flags: made by python -m tests.test_readme -->\n", "<!-- end of flags -->"


def reference() -> str:
    """A table of flags for each group, in the order of their declaration."""
    lines: list[str] = []
    group = ""
    for flag in sorted(flags_of(Settings), key=_group_rank):
        if flag.group != group:
            group = flag.group
            lines += [
                f"\n### {group[0].upper()}{group[1:]}\n",
                "| flag | default | |",
                "|---|---|---|",
            ]
        lines.append(_row(flag))
    return "\n".join(lines) + "\n\n"


def _group_rank(flag: Flag) -> int:
    groups = list(dict.fromkeys(one.group for one in flags_of(Settings)))
    return groups.index(flag.group)


def _row(flag: Flag) -> str:
    name = f"`--{flag.name}`"
    if flag.kind is bool and not flag.name.startswith("no-"):
        name += f" / `--{flag.opposite}`"
    text = flag.declared.help
    if flag.kind is tuple:
        text += "; repeatable"
    if flag.choices:
        text += f" ({', '.join(f'`{choice}`' for choice in flag.choices)})"
    if flag.declared.later:
        text += " — *not available yet*"
    default = flag.shown_default
    return f"| {name} | {default if ' ' in default else f'`{default}`'} | {text} |".replace(
        "``", ""
    )


def test_the_flag_reference_in_the_readme_is_what_the_code_declares() -> None:
    text = README.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == reference()


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(text[:begin] + reference() + text[end:], encoding="utf-8")
