"""Whether this Python can start the plugin; asked before all else, so Python 3.6 and newer must compile this file."""

import sys

_LEAST = (3, 10)
_PACKAGES = ("packaging",)


def why_not(version: "tuple[int, ...]") -> str:
    """Say why the plugin cannot start here; nothing if it can.

    Args:
        version: version of Python, such as ``sys.version_info[:2]``.

    >>> why_not((3, 9)), why_not((3, 12))
    ('Python 3.9 is too old; vtp_plugin needs 3.10 or newer; start it with such a Python', '')
    """
    if version < _LEAST:
        found, least = (".".join(map(str, numbers)) for numbers in (version, _LEAST))
        return f"Python {found} is too old; vtp_plugin needs {least} or newer; start it with such a Python"
    for package in _PACKAGES:
        try:
            __import__(package)
        except ImportError as error:
            return f"{package} cannot be imported ({error}); vtp_plugin needs it; pip install {package}"
    return ""


def end_with(problem: str) -> None:
    """Leave a command with one line and exit code 2; in any other program let the import fail.

    Args:
        problem: what :func:`why_not` says.

    Raises:
        ImportError: no command of the plugin was started.
    """
    # While `python -m` imports the package, the program has no name but this.
    program = sys.argv[0] if sys.argv else ""
    if program != "-m" and program.rpartition("/")[2] != "vtp":
        raise ImportError(problem)
    sys.stderr.write(f"vtp_plugin: error: {problem}\n")
    sys.exit(2)
