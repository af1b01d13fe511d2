"""The one error a user can cause, and the one warning they should read.

Everything that is wrong with what the user gave us ends as an `InputError`: one line that names the
field, the value and the remedy. The command line prints it and exits with status 2, without a traceback.
A package that only an extra brings is imported where it is used; if it is missing, the command line asks
`missing_extra` for that line.
"""

from __future__ import annotations

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


class PointsmanWarning(UserWarning):
    """Something the user asked for will run, but probably not as they expect."""


def _short(value: object, limit: int = 160) -> str:
    """Long values lose their middle: the end of a path says more than its beginning."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit // 3] + "…" + text[-(limit - limit // 3 - 1) :]
