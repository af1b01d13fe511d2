"""The one error a user can cause, and the one warning they should read.

Everything that is wrong with what the user gave us ends as an `InputError`: one line that names the
field, the value and the remedy. The command line prints it and exits with status 2, without a traceback.
A package that only an extra brings is imported where it is used; if it is missing, the command line asks
`missing_extra` for that line.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

EXTRAS = {
    "epp": ("google", "hpack"),
    "ray": ("ray",),
    "redis": ("redis",),
    "serve": ("httptools", "msgspec", "prometheus_client", "uvloop"),
    "train": ("gymnasium", "scipy", "tensorboard", "threadpoolctl", "torch"),
    "vidur": ("vidur",),
}  # what can be imported with each extra of pyproject.toml


class InputError(ValueError):
    """Bad input: `field` is what was wrong, `value` what it held, `remedy` what to do about it."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field} = {_short(value)}: {problem}; {remedy}")


def missing_extra(error: BaseException) -> InputError | None:
    """What to say of a failed import, if an extra would have prevented it."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    for extra, packages in EXTRAS.items():
        if package in packages:
            return InputError("package", package, "is not installed", f"pip install 'pointsman[{extra}]'")
    return None


def no_such_file(field: str, path: Path) -> InputError:
    """Names the file beside it that may have been meant: my-cluster.yaml for my-cluster.yml."""
    try:
        beside = [one.name for one in path.parent.iterdir()]
    except (OSError, ValueError):
        beside = []
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8)
    remedy = f"did you mean {str(path.parent / near[0])!r}?" if near else "check the path"
    return InputError(field, str(path), "no such file", remedy)


def reason_of(error: BaseException) -> str:
    """Why something was refused, in words: no error numbers, no names of classes, no path a second time.

    asyncio says `[Errno 111] Connect call failed ('127.0.0.1', 80)`, and joins such texts for a host that has
    several addresses.
    """
    if isinstance(error, UnicodeError):
        return "not in UTF-8"
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        if isinstance(error, TimeoutError) and error.errno is None:
            return "timed out"
        numbers = re.findall(r"\[Errno (\d+)\]", text)
        if numbers:
            return " and ".join(dict.fromkeys(os.strerror(int(one)).lower() for one in numbers))
        text = error.strerror or text
    return re.sub(r"^\[[\w: -]+\] | \(_ssl\.c:\d+\)$", "", text) or type(error).__name__


class PointsmanWarning(UserWarning):
    """Something the user asked for will run, but probably not as they expect."""


def _short(value: object, limit: int = 160) -> str:
    """Long values lose their middle: the end of a path says more than its beginning."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit // 3] + "…" + text[-(limit - limit // 3 - 1) :]
