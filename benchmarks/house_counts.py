"""How easy the code is to follow, in numbers: what a request and a signal touch, and who imports whom.

Run: python benchmarks/house_counts.py [CHECKOUT …]      (default: this one)

The walks are measured, not read: the interpreted code (NUMBA_DISABLE_JIT=1) runs one request by the default
policy under a profiler, and every function of the package that is entered counts once. `simulate` counts from
the configuration to the printed table, and its compiled part from the arrival of the request to its end.
`serve` counts what happens from the first byte of one streamed request to its end, in the router's process.
All come after a first request, so that nothing is imported meanwhile. `--walk` lists the functions in the
order of their first call.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parents[1]
REQUEST = json.dumps({"model": "m", "prompt": "hello " * 20, "max_tokens": 3, "stream": True}).encode()
CONFIG = """\
workload: {arrivals: {kind: poisson, rate: 1}, lengths: {kind: fixed, prompt: 100, output: 3}, requests: 1}
policy: {kind: default}
"""
QUIET = ("scrape_interval_s", "health_interval_s", "models_interval_s", "max_decision_s")

# In the process that is walked: `seen` keeps functions in the order of their first call.
PROFILER = """
import json, signal, sys, threading
package, out = sys.argv[1], sys.argv[2]
seen = {}
depth = 0  # of the compiled entry point of the simulator
def profile(frame, event, argument):
    global depth
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(package):
        return
    name = f"{code.co_filename[len(package) + 1:]}:{code.co_qualname}"
    if name == "simulator/run.py:run":
        depth += 1 if event == "call" else -1
    if event == "call" and not code.co_name.startswith("<"):
        seen[name] = seen.get(name, False) or depth > 0
def toggle(*_):
    wanted = None if sys.getprofile() else profile
    threading.setprofile(wanted)
    sys.setprofile(wanted)
    with open(out, "w") as file:
        json.dump(seen, file)
from pointsman.cli.main import main
"""
SIMULATE = """
command = ["simulate", sys.argv[3]]
main(command)
toggle()
main(command)
toggle()
"""
SERVE = """
signal.signal(signal.SIGUSR1, toggle)
sys.exit(main(sys.argv[3:]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[HERE])
    parser.add_argument("--walk", action="store_true", help="list the functions of both walks")
    arguments = parser.parse_args()
    for checkout in arguments.checkouts:
        show(checkout.resolve(), arguments.walk)
    return 0


def show(checkout: Path, is_listed: bool) -> None:
    print(checkout)
    sources = {path: path.read_text(encoding="utf-8") for path in (checkout / "pointsman").rglob("*.py")}
    print(f"  lines of the package       {sum(text.count(chr(10)) for text in sources.values()):,}")
    print(f"  files                      {len(sources)}")
    pairs, in_cycles = circles(imports(checkout, sources))
    print(f"  folders that import each other  {len(pairs)} pairs; {len(in_cycles)} folders in cycles")
    name, places = signal_places(checkout, sources)
    print(f"  places of a signal         {len(places)} ({name}: {', '.join(sorted(places))})")
    command = simulated(checkout)
    compiled = {name: True for name, is_inside in command.items() if is_inside}
    walks = {"simulate, the whole command": command, "simulate, its compiled part": compiled}
    for title, walked in (walks | {"a live request": live(checkout)}).items():
        files = {one.partition(":")[0] for one in walked}
        print(f"  walk of {title}   {len(files)} files, {len(walked)} functions")
        if is_listed:
            print("\n".join(f"    {one}" for one in walked))


def imports(checkout: Path, sources: dict[Path, str]) -> dict[str, set[str]]:
    """Folder (or module beside the folders) -> those it imports, wherever in the code, types included."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in sources.items():
        parts = path.relative_to(checkout / "pointsman").with_suffix("").parts
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "pointsman":
                names = [f"pointsman.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                package, _, rest = name.partition(".")
                if package == "pointsman" and rest and rest != "__version__":
                    found[parts[0]].add(rest.partition(".")[0])
    return {folder: targets - {folder} for folder, targets in found.items()}


def circles(graph: dict[str, set[str]]) -> tuple[list[tuple[str, str]], set[str]]:
    """Pairs that import each other, and all that can reach themselves."""
    pairs = [(a, b) for a in graph for b in graph[a] if a < b and a in graph.get(b, ())]

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        return seen

    return pairs, {folder for folder in graph if folder in reached(folder)}


def signal_places(checkout: Path, sources: dict[Path, str]) -> tuple[str, set[str]]:
    """Where the signal `generated_tokens` is declared, numbered, written or listed; readers do not count."""
    name, places = "generated_tokens", set()
    constant = name.upper()

    def names(node: ast.AST) -> Iterator[str]:
        return (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))

    for path, text in sources.items():
        where = str(path.relative_to(checkout / "pointsman"))
        for node in ast.walk(ast.parse(text)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AugAssign) else targets
            if isinstance(node, ast.Call) and any(
                isinstance(one, ast.Constant) and one.value == name for one in node.args
            ):
                places.add(f"{where} declares")
            elif any(isinstance(one, ast.Tuple) and constant in names(one) for one in targets):
                places.add(f"{where} numbers")
            elif any(isinstance(one, ast.Subscript) and constant in names(one.slice) for one in targets):
                places.add(f"{where} writes")
            elif isinstance(node, ast.Tuple) and is_list_of_signals(node, constant):
                places.add(f"{where} lists")
    return name, places


def is_list_of_signals(node: ast.Tuple, constant: str) -> bool:
    """A subscript has two."""
    return len(node.elts) > 2 and any(isinstance(one, ast.Name) and one.id == constant for one in node.elts)


def simulated(checkout: Path) -> dict[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "walk.json"
        config = Path(folder) / "one.yaml"
        config.write_text(CONFIG)
        with started(checkout, SIMULATE, out, [str(config)]) as process:
            if process.wait() != 0:
                raise SystemExit("simulate failed")
        return dict(json.loads(out.read_text()))


def live(checkout: Path) -> dict[str, bool]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port, admin = free_port(), free_port()
    options = [
        "serve",
        "--quiet",
        "--policy",
        "default",
        "--backend",
        f"http://127.0.0.1:{server.server_port}",
    ]
    options += ["--port", str(port), "--admin-port", str(admin)]
    for setting in QUIET:
        options += ["--set", f"reliability.{setting}=600"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "walk.json"
        with started(checkout, SERVE, out, options) as process:
            deadline = time.monotonic() + 120
            while not answers(port):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit("serve did not start")
                time.sleep(0.2)
            time.sleep(1)  # for what follows the end of the first one
            toggle(process, out)
            assert answers(port)
            toggle(process, out)
            process.send_signal(signal.SIGTERM)
            process.wait()
        server.shutdown()
        return dict(json.loads(out.read_text()))


def toggle(process: subprocess.Popen[bytes], out: Path) -> None:
    out.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    while not out.exists():
        time.sleep(0.05)
    time.sleep(0.2)


def started(
    checkout: Path, code: str, out: Path, options: list[str] | None = None
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(checkout), "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", PROFILER + code, str(checkout / "pointsman"), str(out), *options]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, cwd=checkout, stdout=quiet, stderr=quiet)


def answers(port: int) -> bool:
    headers = {"Content-Type": "application/json"}
    try:
        with urlopen(
            Request(f"http://127.0.0.1:{port}/v1/completions", REQUEST, headers), timeout=60
        ) as answer:
            return b"[DONE]" in answer.read()
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Replica(BaseHTTPRequestHandler):
    """Streams three tokens; knows nothing else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        text = json.dumps({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "a"}]})
        for event in (text, text, text, "[DONE]"):
            data = f"data: {event}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            time.sleep(0.05)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    sys.exit(main())
