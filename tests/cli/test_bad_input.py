"""Whatever is wrong with the input: one line that names field, value and remedy, status 2, no file left."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Cli, Result
from .factories import config_file

SYNTHETIC = "workload={arrivals: {kind: poisson, load: %s}, lengths: azure-conv}"


def check(result: Result, *texts: str) -> None:
    assert result.status == 2
    assert result.out == ""
    *notices, error = result.err.splitlines()  # how a trace was understood may come first
    assert error.startswith("error: ")
    assert all(notice.startswith(("trace.csv: ", "warning: trace.csv: ")) for notice in notices)
    for text in texts:
        assert text in result.err


def simulate(
    cli: Cli, folder: Path, *rows: str, header: str | None = None, overrides: tuple[str, ...] = ()
) -> Result:
    """With every output asked for; none of them may be there afterwards."""
    inputs = folder / "inputs"
    inputs.mkdir()
    config = config_file(inputs, *rows, **({"header": header} if header is not None else {}))
    before = sorted(folder.rglob("*"))
    outputs = ("--requests", folder / "new" / "requests.csv", "--trace-out", folder / "trace.json")
    sets = [part for override in overrides for part in ("--set", override)]
    result = cli("simulate", config, *sets, *outputs)
    assert sorted(folder.rglob("*")) == before
    return result


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        ("0,-5,10", "num_prefill_tokens", "-5"),
        ("0,5,-10", "num_decode_tokens", "-10"),
        ("0,1e10,10", "num_prefill_tokens", "1e10"),
        ("0,NaN,10", "num_prefill_tokens", "NaN"),
        ("nan,5,10", "arrived_at", "nan"),
        ("-1,5,10", "arrived_at", "-1"),
        ("inf,5,10", "arrived_at", "inf"),
        ("0,1.5,10", "num_prefill_tokens", "1.5"),
        ("0,many,10", "num_prefill_tokens", "many"),
        ("0,,10", "num_prefill_tokens", "no value"),
    ],
)
def test_bad_values_name_file_line_and_column(
    cli: Cli, tmp_path: Path, row: str, column: str, value: str
) -> None:
    result = simulate(cli, tmp_path, "0,9,9", row)
    check(result, "trace.csv line 3", f"column {column}", value, "correct or remove the row")


def test_missing_column(cli: Cli, tmp_path: Path) -> None:
    result = simulate(cli, tmp_path, "0,5", header="arrived_at,num_prefill_tokens")
    check(result, "trace.csv", "no known column for output lengths", "num_decode_tokens: NAME")


def test_empty_trace(cli: Cli, tmp_path: Path) -> None:
    check(simulate(cli, tmp_path), "trace.csv", "no requests")


def test_no_trace(cli: Cli, tmp_path: Path) -> None:
    result = simulate(cli, tmp_path, "0,5,5", overrides=("workload.trace=absent.csv",))
    check(result, "absent.csv", "no such file")


def test_prompt_larger_than_kv_memory(cli: Cli, tmp_path: Path) -> None:
    result = simulate(cli, tmp_path, "0,9,9", "0,500000,9")
    check(result, "workload request 1", "500000", "num_blocks")


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("workloda.requests=5", ("workloda", "unknown key", "'workload'")),
        ("workload.request=5", ("workload.request = 5", "unknown key", "'requests'")),
        ("workload.trace.repeats=5", ("workload.trace.repeats = 5", "unknown key", "'repeat'")),
        ("cluster.scheduler.chunksize=5", ("cluster.scheduler.chunksize = 5", "'chunk_size'")),
        ("cluster.signals.orakle=true", ("cluster.signals.orakle", "'oracle'")),
        ("cluster.scheduler.kind=sarathy", ("cluster.scheduler.kind = 'sarathy'", "'sarathi'")),
        ("policy.kind=least-wrok", ("policy = 'least-wrok'", "least-work")),
        ("cluster.device=H-100", ("'H-100'", "H100")),
        ("cluster.tensor_parallel=3", ("tensor_parallel = 3", "32 attention heads", "use one of")),
        ("cluster.scheduler.pipeline_stages=40", ("= 40", "32 layers")),
        ("cluster.replicas=0", ("cluster.replicas", "0")),
        ("cluster.cost.a=-1", ("cluster.cost.a = -1",)),
        ("cluster.replicas=1000000000", ("cluster.replicas = 1000000000", "at most 16,384")),
        ("cluster.replicas=null", ("cluster.replicas = None:",)),
        ("cluster.replicas=[{devic: H100}]", ("cluster.replicas.0.devic", "did you mean 'device'?")),
        ("cluster.scheduler.num_blocks=1000000000", ("cluster.scheduler.num_blocks", "2000000")),
        ("cluster.scheduler.chunk_size=10000000000", ("cluster.scheduler.chunk_size", "2000000")),
        ("workload=5", ("workload = 5: is not a section with keys of its own",)),
        ("workload.trace.begin=2024-99-99", ("2024-99-99", "is not a YAML value")),
        ("seed=x", ("seed = 'x': must be a whole number",)),
        ("seed=yes", ("seed = True: must be a number",)),
        ("slo.ttft_s=on", ("slo.ttft_s = True: must be a number",)),
        (
            "cluster.replicas=[{count: 2, dtype: bf16}]",
            ("cluster.replicas.0.dtype = 'bf16': must be ",),
        ),
        (
            "cluster.replicas=[{}, {slowdown: 0}]",
            ("cluster.replicas.1.slowdown = 0: must be greater",),
        ),
        ("cluster.replicas=[{count: 0}]", ("cluster.replicas.0.count = 0: must be greater than 0",)),
        ("cluster.replicas=[{device: 4090}]", ("cluster.replicas.0.device = 4090: must be text",)),
        ("cluster.replicas=[{tensor_parallel: 0}]", ("cluster.replicas.0.tensor_parallel = 0: must be gr",)),
        (
            "cluster.replicas=[{scheduler: {kind: vllm-v1, max_num_seq: 3}}]",
            ("cluster.replicas.0.scheduler.max_num_seq = 3: unknown key", "did you mean 'max_num_seqs'?"),
        ),
        ("cluster.replicas=[{cost: {kind: linear}}]", ("cluster.replicas.0.cost.a = None: missing",)),
        ("cluster.replicas=[3]", ("cluster.replicas.0 = 3: is not a section with keys",)),
        ("cluster.replicas={count: 2}", ("cluster.replicas = {'count': 2}: must be a whole number",)),
        ("cluster.replicas=true", ("cluster.replicas = True: must be a number",)),
        ("slo.ttft_s=fast", ("slo.ttft_s = 'fast': must be a number",)),
        ("workload.requests=1e99999", ("workload.requests = ",)),
        ("workload.requests=1.5", ("workload.requests = 1.5: must be a whole number",)),
        ("cluster.signals.oracle=7", ("cluster.signals.oracle = 7: must be true or false",)),
        ("requests", ("--set = 'requests'", "key=value")),
    ],
)
def test_bad_configuration_names_the_key(
    cli: Cli, tmp_path: Path, override: str, texts: tuple[str, ...]
) -> None:
    check(simulate(cli, tmp_path, "0,5,5", overrides=(override,)), *texts)


def test_an_exponent_is_a_number(cli: Cli, tmp_path: Path) -> None:
    """Of whole numbers too, though YAML takes 1e2 for text."""
    assert cli("simulate", "--set", SYNTHETIC % 0.5, "--set", "workload.requests=1e2").status == 0


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace.csv.gz"])
def test_a_trace_instead_of_a_configuration(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n")
    result = cli("compare", tmp_path / name)
    check(result, name, "is a trace, not a configuration", f"workload: {{trace: {name}}}")


def test_broken_yaml_names_the_file_and_the_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("workload:\n\ttrace: x\n")
    check(cli("simulate", tmp_path / "my.yaml"), "not valid YAML", 'in "my.yaml", line 2')


def test_model_too_large(cli: Cli) -> None:
    check(cli("simulate", "--set", "cluster.model=Llama-3-70B"), "Llama-3-70B", "tensor_parallel 2")


def test_load_above_capacity_with_no_end(cli: Cli) -> None:
    result = cli("simulate", "--set", SYNTHETIC % 1.2)
    check(result, "workload.arrivals.load = 1.2", "no end", "workload.requests or workload.duration_s")


def test_bounded_overload_runs_with_a_warning(cli: Cli) -> None:
    result = cli("simulate", "--set", SYNTHETIC % 1.2, "--set", "workload.requests=200")
    assert result.status == 0
    assert result.err.startswith("warning: workload.arrivals.load = 1.2: above capacity")
    assert result.err.count("\n") == 1


def test_warnings_are_said_once(cli: Cli) -> None:
    small = ("--set", "workload.requests=100", "--policies", "least-work", "--seeds", 3)
    result = cli("compare", "--scenario", "overload", *small)
    assert result.status == 0
    assert result.err.count("warning: ") == result.err.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["a: [", "- 1", "", "\x00\xff", "workload: 5", "[" * 2000, "a: 2024-99-99"]
)
def test_not_a_configuration(cli: Cli, tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    check(cli("simulate", path))


def test_a_key_that_is_there_twice(cli: Cli, tmp_path: Path) -> None:
    """The first one would be lost without a word."""
    path = tmp_path / "cluster.yaml"
    path.write_text("workload: {trace: a.csv}\ncluster: {replicas: 2}\nworkload: {trace: b.csv}\n")
    check(cli("simulate", path), "the key 'workload' is there twice", "line 3")
    path.write_text("usual: &usual {trace: a.csv}\nworkload: {<<: *usual, trace: b.csv}\n")
    check(cli("simulate", path), "usual", "unknown key")


def test_requests_that_no_replica_can_hold(cli: Cli) -> None:
    lengths = "{kind: lognormal, prompt_mean: 1000000000, output_mean: 10}"
    workload = f"workload={{arrivals: {{kind: poisson, load: 0.5}}, lengths: {lengths}, requests: 10}}"
    check(cli("simulate", "--set", workload), "no replica can hold such long requests", "workload.max_tokens")


def test_a_scheduler_without_a_kind_is_the_usual_one(cli: Cli) -> None:
    result = cli("simulate", "--set", "cluster.scheduler.max_num_seqs=64", "--set", "workload.requests=50")
    assert result.status == 0, result.err


def test_no_configuration(cli: Cli, tmp_path: Path) -> None:
    check(cli("simulate", tmp_path / "absent.yaml"), "absent.yaml", "no such file")
    check(cli("compare", tmp_path), "is a directory")


@pytest.mark.parametrize("command", ["simulate", "compare", "capacity"])
def test_configuration_and_scenario_exclude_each_other(cli: Cli, tmp_path: Path, command: str) -> None:
    result = cli(command, config_file(tmp_path, "0,5,5"), "--scenario", "mixed")
    check(result, "CONFIG", "--scenario")


@pytest.mark.parametrize("command", ["simulate", "compare", "capacity"])
def test_unknown_scenario(cli: Cli, command: str) -> None:
    check(cli(command, "--scenario", "stedy-chat"), "--scenario = 'stedy-chat'", "'steady-chat'")


def test_outputs_are_checked_before_anything_is_simulated(cli: Cli, tmp_path: Path) -> None:
    """Ten million requests would take a while."""
    long = ("--set", "workload.requests=10000000")
    (tmp_path / "file").write_text("x")
    check(cli("simulate", *long, "--requests", tmp_path), "--requests", "is a directory")
    check(cli("simulate", *long, "--trace-out", tmp_path / "file" / "t.json"), "--trace-out", "under a file")
    check(cli("simulate", *long, "--requests", "/proc/none/r.csv"), "/proc/none/r.csv", "cannot be written")
    check(cli("compare", *long, "--out", tmp_path / "file"), "--out", "is a file")
    check(cli("simulate", *long, "--requests", tmp_path / ("x" * 300)), "--requests", "file name too long")
    same = ("--requests", tmp_path / "r", "--trace-out", tmp_path / "r")
    check(cli("simulate", *long, *same), "--trace-out", "is also --requests")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("command", ["evaluate", "explain", "report", "diagnose", "watch"])
def test_a_name_that_no_file_can_have(cli: Cli, command: str) -> None:
    check(cli(command, "x" * 300), "file name too long")


def test_a_full_disk_is_one_line(cli: Cli) -> None:
    result = cli("simulate", "--set", "workload.requests=50", "--requests", "/dev/full")
    check(result, "--requests = '/dev/full'", "no space left on device")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--policies", "least-wrok"), ("--policies = 'least-wrok'", "least-work")),
        (("--policies", ""), ("--policies = ''",)),
        (("--policies", "linear-score"), ("linear-score needs a weight",)),
        (("--baseline", "nothing"), ("--baseline = 'nothing'", "unknown policy")),
        (("--policies", "absent.yaml"), ("--policies = 'absent.yaml'", "no such file")),
        (("--objective", "tale"), ("--objective = 'tale'", "did you mean 'tail'?")),
        (("--seeds", "0"), ("--seeds = 0", "1 to 1000")),
        (("--seeds", "1001"), ("--seeds = 1001",)),
        (("--threads", "-1"), ("--threads = -1",)),
        (("--set", "seed=3"), ("--set seed", "--seeds")),
        (("--seeds", "many"), ("--seeds", "pointsman compare --help")),
    ],
)
def test_bad_comparison(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], texts: tuple[str, ...]) -> None:
    check(cli("compare", *arguments, "--out", tmp_path / "out"), *texts)
    assert not (tmp_path / "out").exists()


def test_events_of_a_scenario_need_a_rate(cli: Cli) -> None:
    closed = "workload={arrivals: {kind: closed, users: 3}, lengths: azure-conv, requests: 50}"
    check(cli("simulate", "--scenario", "failure", "--set", closed), "cluster.events")
