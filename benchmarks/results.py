"""Every measured table of README and docs from scratch, and which of its figures differ from the page.

    .venv/bin/python benchmarks/results.py --list               # what there is, how long it takes
    .venv/bin/python benchmarks/results.py                      # `make results`: what needs nothing special
    .venv/bin/python benchmarks/results.py --page heuristics    # one page, whatever it takes
    … --write                                                   # put the new tables where the old ones stand

Commands are those of results.yaml, each run once for all tables that come from it. Figures differ if their
95 % intervals do not meet; the exit status is 1 if any do. Nothing is computed here: tables are taken from
what the commands print, or write as `table.md`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import yaml
from documented import ROOT, blocks, differences, replaced, tables

SOURCES = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Table:
    """A table of a page. Which part of the output of its command it is, results.yaml explains."""

    page: str
    table: int | None = None
    section: str | None = None
    start: str | None = None
    pictures: Sequence[str] = ()  # beside the page, by the names they have in OUT

    @property
    def is_by_hand(self) -> bool:
        return self.table is None and self.section is None and self.start is None

    def taken_from(self, output: str) -> str:
        if self.start is not None:
            return output[output.index(self.start) :].strip()
        if self.section is not None:
            output = output[output.index(f"## {self.section}") :].split("\n## ")[0]
        return "\n".join(tables(output)[self.table or 0])


@dataclass(frozen=True)
class Source:
    """A command, and the tables that come from it."""

    command: str
    seeds: str
    minutes: float
    tables: Mapping[str, Table]
    needs: str = ""
    reads: str = "printed.txt"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument(
        "--page", action="append", default=[], metavar="NAME", help="or the name of a table; repeat it"
    )
    parser.add_argument("--write", action="store_true", help="put the new tables on the pages")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep outputs; what is there is not made again"
    )
    options = parser.parse_args()
    wanted = wanted_sources(options.page)
    if not wanted:
        parser.error(f"--page {' '.join(options.page)}: no such page; there are {', '.join(page_names())}")
    if options.list:
        print_list(wanted)
        return
    if not options.page:
        wanted = {name: source for name, source in wanted.items() if not source.needs}
    with tempfile.TemporaryDirectory() as folder:
        outputs = options.out or Path(folder)
        is_same = [renew(source, outputs / name, options.write) for name, source in wanted.items()]
    sys.exit(0 if all(is_same) else 1)


def read_sources() -> dict[str, Source]:
    found = {}
    for name, entry in yaml.safe_load(SOURCES.read_text(encoding="utf-8")).items():
        placed = {table: Table(**where) for table, where in entry.pop("tables").items()}
        found[name] = Source(tables=placed, **entry)
    return found


def wanted_sources(asked: Sequence[str]) -> dict[str, Source]:
    """With the tables asked for by their own name or that of their page; without a name, all."""
    found = {}
    for name, source in read_sources().items():
        kept = {
            key: one
            for key, one in source.tables.items()
            if not asked or {key, Path(one.page).stem} & {*asked}
        }
        if kept:
            found[name] = replace(source, tables=kept)
    return found


def page_names() -> list[str]:
    return sorted(
        {Path(one.page).stem for source in read_sources().values() for one in source.tables.values()}
    )


def print_list(sources: Mapping[str, Source]) -> None:
    for name, source in sources.items():
        print(f"{name}: {source.minutes:g} min" + (f"; needs: {source.needs}" if source.needs else ""))
        print(f"    {source.command}")
        for table, one in source.tables.items():
            print(f"    {one.page}: {table}" + (", by hand" if one.is_by_hand else ""))


def renew(source: Source, out: Path, is_written: bool) -> bool:
    """Run it, say what differs on each page, and write it there if asked to. Whether nothing differs.

    What would only be copied by hand is not run: it says how to make it.
    """
    if all(one.is_by_hand for one in source.tables.values()):
        print(f"{', '.join(source.tables)}: by hand, from `{source.command}`", flush=True)
        return True
    output = output_of(source, out)
    is_same = True
    for name, one in source.tables.items():
        if one.is_by_hand:
            print(f"{one.page}, {name}: to be copied by hand")
            continue
        page = ROOT / one.page
        text = page.read_text(encoding="utf-8")
        new = f"{one.taken_from(output)}\n\n{made_line(source)}"
        found = differences(blocks(text)[name], new)
        is_same &= not any(line.startswith("differs") for line in found)
        print("\n  ".join([f"{one.page}, {name}: {'' if found else 'the same'}", *found]), flush=True)
        if is_written:
            page.write_text(replaced(text, name, new), encoding="utf-8")
            for picture in one.pictures:
                shutil.copy(out / picture, page.parent / picture)
    return is_same


def output_of(source: Source, out: Path) -> str:
    """What the command prints or writes, kept in `out`."""
    kept = out / source.reads
    if not kept.exists():
        out.mkdir(parents=True, exist_ok=True)
        program, *arguments = shlex.split(source.command.replace("OUT", str(out)))
        module = ["-m", "pointsman"] if program == "pointsman" else []
        command = [sys.executable, *module, *arguments]
        print(source.command, file=sys.stderr, flush=True)
        started = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        if done.stdout:
            (out / "printed.txt").write_text(done.stdout, encoding="utf-8")
        if not kept.exists():
            raise SystemExit(f"status {done.returncode}, and nothing to read: {source.command}")
        print(f"  {(time.perf_counter() - started) / 60:.1f} min", file=sys.stderr, flush=True)
    return kept.read_text(encoding="utf-8")


def shown_command(source: Source) -> str:
    return re.sub(r" --out OUT\S*", "", source.command)


def made_line(source: Source) -> str:
    command = ("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    revision = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"*`{shown_command(source)}`; {source.seeds}; {datetime.now(UTC):%Y-%m-%d}, revision {revision}.*"


if __name__ == "__main__":
    main()
