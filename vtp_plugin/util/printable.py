"""Texts that others wrote, as a terminal and a log may show them."""

from __future__ import annotations

MOST_CHARACTERS = 2000
"""So much of a text of another rank is shown, kept or passed on."""
_CUT = " ... (cut)"


def plain(text: str) -> str:
    r"""Write out every character that is not to be seen, but for ends of lines and tabs.

    Whoever wrote a text could else clear a terminal, change its title, hide or forge lines with it.

    >>> plain("a\x1b[2Jb\n\u202ec\x07")
    'a\\x1b[2Jb\n\\u202ec\\x07'
    """
    if text.isprintable():
        return text
    # A long text is mostly lines without any.
    return "\n".join(line if line.isprintable() else _written_out(line) for line in text.split("\n"))


def _written_out(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Make one plain line of a text, and cut it.

    >>> one_line("two\nlines\x1b[2J"), one_line("x" * 30, most=20)
    ('two lines\\x1b[2J', 'xxxxxxxxxx ... (cut)')
    """
    # Before it is joined: whoever wrote a text of many MiB has it copied only so far.
    line = " ".join(plain(text[: most + 1]).split())
    if len(text) <= most and len(line) <= most:
        return line
    return f"{line[: most - len(_CUT)]}{_CUT}"
