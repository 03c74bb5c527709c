"""The command as a process of its own: killed, terminated, without the extra, and several at once."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pergrad
from pergrad.audit import AuditOptions, run_audit
from tests.audit import cases
from tests.starting import Started

ROOT = Path(__file__).parents[2]
CASES = "tests.audit.cases"
FLOAT64 = ("--dtype", "float64", "--batch-size", "16", "--save-every", "0")
OPTIONS = AuditOptions(dtype="float64", batch_size=16, save_every=0)  # the same
TABLES = {"samples", "duplicates", "pushes", "shown"}


def environment(**changes):
    source = str(Path(pergrad.__file__).parents[1])
    path = os.pathsep.join([source, str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def start(*arguments, cwd, **changes):
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_audit(*arguments, cwd, **changes):
    return Started("pergrad", "audit", *map(str, arguments), cwd=cwd, **changes)


def finish(process, code=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def stop_in_the_middle(process, folder, how):
    """Send the signal once a few chunks are there."""
    for _ in range(1000):
        if len(list(folder.glob("chunks/*.npz"))) >= 3:
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(how)
    return process.communicate(timeout=60)


def tables(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.parquet"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tables of an audit that nobody has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run_audit(cases.slow(), folder, OPTIONS)
    return tables(folder)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_stopped_audit_goes_on_to_the_same_tables_bit_for_bit(tmp_path, whole, how):
    stopped = start_audit(f"{CASES}:slow", *FLOAT64, "-o", "out", cwd=tmp_path)
    _, err = stop_in_the_middle(stopped, tmp_path / "out", how)
    assert stopped.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[how], err
    assert not (tmp_path / "out/summary.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/chunks").iterdir()}
    run_audit(cases.slow(), tmp_path / "out", OPTIONS)
    assert tables(tmp_path / "out") == whole
    assert {name.partition(".")[0] for name in whole} == TABLES
    kept = [path for path in before if path.suffix == ".npz"]
    assert 3 <= len(kept) < 25
    assert all(path.stat().st_mtime_ns == before[path] for path in kept)


@pytest.mark.slow
def test_twenty_thousand_samples_killed_twice_give_the_same_tables_bit_for_bit(tmp_path):
    audit = ("pergrad", "audit", f"{CASES}:twenty_thousand", *FLOAT64)
    finish(start(*audit, "-o", "whole", cwd=tmp_path))
    for _ in range(2):
        process = start(*audit, "-o", "killed", cwd=tmp_path)
        before = len(list((tmp_path / "killed").glob("chunks/*.npz")))
        for _ in range(3000):
            if len(list((tmp_path / "killed").glob("chunks/*.npz"))) > before + 300:
                break
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert not (tmp_path / "killed/summary.json").exists()
    finish(start(*audit, "-o", "killed", cwd=tmp_path))
    assert tables(tmp_path / "killed") == tables(tmp_path / "whole")


def torchrun(count, *arguments, cwd):
    run = ("torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "--no-python")
    command = (sys.executable, "-m", "pergrad", *arguments)
    return Started(*run, *command, cwd=cwd, PYTHONPATH=environment()["PYTHONPATH"])


def test_two_processes_give_the_rows_of_one(tmp_path):
    out, _ = finish(torchrun(2, "audit", f"{CASES}:mlp", *FLOAT64, "-o", "two", cwd=tmp_path))
    run_audit(cases.mlp(), tmp_path / "one", OPTIONS)
    assert tables(tmp_path / "two") == tables(tmp_path / "one")
    assert out.count("report.html") == 1
    assert '"processes": 2' in (tmp_path / "two/summary.json").read_text()


@pytest.mark.slow
def test_two_processes_go_on_where_one_has_stopped(tmp_path, whole):
    run_audit(cases.slow(), tmp_path / "out", OPTIONS)
    for path in (tmp_path / "out/summary.json", *(tmp_path / "out/chunks").glob("*[26]-*.npz")):
        path.unlink()
    finish(torchrun(2, "audit", f"{CASES}:slow", *FLOAT64, "-o", "out", cwd=tmp_path))
    assert tables(tmp_path / "out") == whole


def ranks(count, *arguments, cwd):
    """The processes of an audit without torchrun, which would end the others when one is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start_audit(*arguments, cwd=cwd, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(count)
    ]


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_other_with_a_message_and_the_next_run_goes_on(
    tmp_path, whole, killed
):
    audit = (f"{CASES}:slow", *FLOAT64, "-o", "out")
    both = ranks(2, *audit, cwd=tmp_path)
    stop_in_the_middle(both[killed], tmp_path / "out", signal.SIGKILL)
    left = both[1 - killed]
    try:
        _, err = left.communicate(timeout=60)
    finally:
        left.kill()
    assert left.returncode == 3, err
    assert "has ended: all rows written so far are kept; run the same command to resume" in err
    assert not (tmp_path / "out/summary.json").exists()
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/chunks").glob("*.npz")}
    for process in ranks(2, *audit, cwd=tmp_path):
        finish(process)
    assert tables(tmp_path / "out") == whole
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


@pytest.mark.slow
def test_a_killed_rank_of_a_sharded_model_ends_the_other_and_the_next_run_goes_on(tmp_path, whole):
    audit = (f"{CASES}:sharded", *FLOAT64, "-o", "out")
    both = ranks(2, *audit, cwd=tmp_path)
    stop_in_the_middle(both[1], tmp_path / "out", signal.SIGKILL)
    try:
        _, err = both[0].communicate(timeout=60)
    finally:
        both[0].kill()
    assert both[0].returncode == 3, err
    assert "all rows written so far are kept; run the same command to resume" in err
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/chunks").glob("*.npz")}
    finish(torchrun(2, "audit", *audit, cwd=tmp_path))
    assert tables(tmp_path / "out") == whole
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_other_within_a_minute(tmp_path, whole):
    audit = (f"{CASES}:slow", *FLOAT64, "-o", "out")
    both = ranks(2, *audit, cwd=tmp_path)
    try:
        for _ in range(3000):
            if len(list((tmp_path / "out").glob("chunks/*.npz"))) >= 3:
                break
            time.sleep(0.01)
        both[1].send_signal(signal.SIGSTOP)
        _, err = both[0].communicate(timeout=60)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[0].returncode == 3, err
    assert "process 1 gives no sign of life: all rows written so far are kept" in err
    for process in ranks(2, *audit, cwd=tmp_path):
        finish(process)
    assert tables(tmp_path / "out") == whole


@pytest.mark.slow
def test_torchrun_ends_the_others_of_a_killed_rank_and_they_say_how_to_resume(tmp_path):
    process = torchrun(2, "audit", f"{CASES}:one_dies", *FLOAT64, "-o", "out", cwd=tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    said = [line for line in err.splitlines() if line.startswith("pergrad: ")]
    assert said
    assert all(line.endswith("run the same command to resume") for line in said)


@pytest.mark.slow
def test_twenty_thousand_samples_killed_at_random_moments_give_the_same_bytes(tmp_path):
    audit = (f"{CASES}:twenty_thousand", *FLOAT64)
    finish(start("pergrad", "audit", *audit, "-o", "whole", cwd=tmp_path))
    draw = random.Random(0)
    chunks = tmp_path / "killed/chunks"
    for is_last in (False, False, False, True):
        both = ranks(2, *audit, "-o", "killed", cwd=tmp_path)
        before, more = len(list(chunks.glob("*.npz"))), draw.randint(1, 100)
        while len(list(chunks.glob("*.npz"))) <= before + more:
            assert all(process.poll() is None for process in both)
            time.sleep(draw.uniform(0, 0.01))
        one, other = draw.sample(both, 2)
        one.kill()
        if not is_last:  # else the other one computes what is left, and stops at the end
            time.sleep(draw.uniform(0, 0.1))
            other.kill()
        said = [process.communicate(timeout=60)[1] for process in both]
        assert (one.returncode, other.returncode) == (-9, 3 if is_last else -9), said
        assert not (tmp_path / "killed/summary.json").exists()
    for process in ranks(2, *audit, "-o", "killed", cwd=tmp_path):
        finish(process)
    assert tables(tmp_path / "killed") == tables(tmp_path / "whole")


def test_processes_with_different_models_are_refused(tmp_path):
    process = torchrun(2, "audit", f"{CASES}:unseeded", cwd=tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    lines = [line for line in err.splitlines() if line.startswith("pergrad: ")]
    assert lines == [
        "pergrad: processes 0 and 1 differ in model: seed all random draws in the reference, so that every "
        "process builds the same spec"
    ]
    assert not (tmp_path / "pergrad-audit/summary.json").exists()


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extra}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
sys.argv = {argv}
from pergrad.cli import main
main()
"""
EXTRA = ("typer", "rich", "pyarrow", "numpy", "jinja2", "PIL")


def without(extra, *arguments):
    code = BLOCKED.format(extra=extra, argv=["pergrad", *arguments])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )


def test_version_needs_torch_alone():
    done = without(EXTRA, "--version")
    assert (done.returncode, done.stdout) == (0, f"pergrad {pergrad.__version__}\n")


@pytest.mark.parametrize("missing", ["typer", "pyarrow"])
def test_without_the_extra_one_line_says_what_to_install(missing):
    done = without((missing,), "audit", "a:b")
    assert done.returncode == 2
    assert done.stderr == (
        f"pergrad: the commands need {missing}, which is not installed: pip install 'pergrad[audit]'\n"
    )


COMPLETIONS = {
    "pergrad ": "audit",
    "pergrad audit --sub": "--subset",
    "pergrad audit --dtype f": "float64",
}
COMPLETE = """
import os, runpy, sys
for words in sys.argv[1:]:
    os.environ.update(COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    try:
        runpy.run_module("pergrad", run_name="__main__")
    except SystemExit:
        print(flush=True)
    print("--", flush=True)
"""


def test_the_shell_completes_commands_options_and_values():
    done = subprocess.run(  # one process for all: most of the time goes into imports
        [sys.executable, "-c", COMPLETE, *COMPLETIONS],
        capture_output=True,
        text=True,
        env=environment(_PERGRAD_COMPLETE="complete_bash"),
    )
    found = done.stdout.split("--\n")[:-1]
    for words, expected in zip(found, COMPLETIONS.values(), strict=True):
        assert expected in words.split(), done.stderr
