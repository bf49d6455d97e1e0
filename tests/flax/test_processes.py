"""Several processes as one run: what goes wrong is told clearly, in all of them, in time; nothing is lost."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from braintrace_flax import launch
from braintrace_flax.runs import command
from braintrace_flax.runs.meeting import MeetingFailed, meet
from braintrace_flax.runs.processes import Processes
from braintrace_flax.runs.records import read_records
from braintrace_flax.runs.watch import AGAIN, Watch
from tests.flax.test_meshes import free_port

pytestmark = pytest.mark.several_devices

ROOT = Path(__file__).parents[2]
CONFIG = """
from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Copy

config = Config(
    name="tiny", task=Copy(symbols=2, length=1, delay=2), network=LRU(units=2, width=2, layers=1), window=2,
    batch_size=4, steps=STEPS, evaluate_every=0, checkpoint_every=5, log_every=5,
)
"""


# The meeting


def gather(*calls):
    """Call ``meet`` in threads; what each raised, or None."""
    found = [None] * len(calls)

    def one(i, call):
        try:
            meet(*call)
        except MeetingFailed as error:
            found[i] = str(error)

    threads = [threading.Thread(target=one, args=(i, call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # the last to come hears of what was wrong before, too
    for thread in threads:
        thread.join(30)
    return found


def test_processes_meet():
    where = f"127.0.0.1:{free_port()}"
    assert gather(*((where, 3, i, {"window": 4}, 10.0) for i in (2, 0, 1))) == [None] * 3


def test_processes_about_different_runs_are_told_so():
    where = f"127.0.0.1:{free_port()}"
    found = gather(*((where, 3, i, {"window": 4 + (i == 1), "rule": "rtrl"}, 3.0) for i in range(3)))
    expected = "The processes are about different runs: process 1 has window = 5 where process 0 has 4."
    assert found == [expected] * 3


def test_a_process_that_does_not_come_is_named():
    where = f"127.0.0.1:{free_port()}"
    found = gather((where, 3, 0, {}, 1.0), (where, 3, 1, {}, 1.0))
    assert found == ["Of 3 processes, 2 did not come within 1 s."] * 2


def test_a_coordinator_that_cannot_be_reached():
    (found,) = gather((f"127.0.0.1:{free_port()}", 2, 1, {}, 1.0))
    assert "cannot be reached within 1 s" in found
    assert "is process 0 running there" in found


def test_two_processes_with_one_number_and_with_different_counts():
    where = f"127.0.0.1:{free_port()}"
    found = gather(*((where, 3, i, {}, 10.0) for i in (0, 1, 1)))
    assert found == ["Two processes have the number 1, or it is not below 3."] * 3
    where = f"127.0.0.1:{free_port()}"
    found = gather((where, 2, 0, {}, 10.0), (where, 3, 1, {}, 10.0))
    assert found == ["Process 1 was told of 3 processes, process 0 of 2."] * 2


def test_somebody_elses_call_does_not_disturb():
    port = free_port()

    def stranger():
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n"):
            for _ in range(50):
                try:
                    with socket.create_connection(("127.0.0.1", port), 1) as call:
                        call.sendall(said)
                    break
                except OSError:
                    time.sleep(0.02)

    other = threading.Thread(target=stranger)
    other.start()
    late = threading.Timer(0.5, lambda: meet(f"127.0.0.1:{port}", 2, 1, {}, 10.0))
    late.start()
    meet(f"127.0.0.1:{port}", 2, 0, {}, 10.0)
    other.join()
    late.join()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_processes": 2}, "need `--coordinator host:port`"),
        ({"coordinator": "here", "num_processes": 2}, "written host:port"),
        ({"coordinator": "here:99999", "num_processes": 2}, "written host:port"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "below `--num-processes`"),
        ({"coordinator": "a:1", "num_processes": 0}, "below `--num-processes`"),
        ({"coordinator": "a:1", "peer_timeout": 0.0}, "at least 1"),
    ],
)
def test_wrong_numbers_are_refused(given, text):
    with pytest.raises(MeetingFailed, match=text):
        Processes(**given)


# The watch


@pytest.fixture
def watches():
    """Makes watches of several processes, with what each was told."""
    made = []
    yield lambda count: _watches(count, made)
    for watch in made:
        watch.close()


def _watches(count, made, timeout=0.4):
    told = [[] for _ in range(count)]
    found = [Watch(timeout, told[i].append) for i in range(count)]
    made += found
    port = found[0].listen(count)
    for i in range(1, count):
        found[i].connect(("127.0.0.1", port), i)
    return found, told


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_all_hear_of_a_process_that_is_gone(watches):
    found, told = watches(3)
    time.sleep(1.0)  # signs of life keep everybody content
    assert told == [[], [], []]
    for connection in found[1]._connections.values():
        connection.shutdown(socket.SHUT_RDWR)
    until(lambda: told[0] and told[2])
    assert told[0] == told[2] == ["Process 1 is gone."]


def test_silence_counts_as_loss(watches):
    found, told = watches(2)
    found[1]._done.set()  # says nothing any more, and does not hang up
    until(lambda: told[0])
    assert told[0] == ["Process 1 has not been heard of for 0.4 s."]


def test_who_leaves_is_not_lost_unless_it_failed(watches):
    found, told = watches(3)
    found[1].close()
    time.sleep(0.8)
    assert told == [[], [], []]
    found[2].close("No room left.")
    until(lambda: told[0])
    assert told[0] == ["Process 2 ended: No room left."]


def test_a_process_that_never_calls_is_missed():
    told = []
    watch = Watch(0.2, told.append)
    watch.listen(2)
    until(lambda: told)
    watch.close()
    assert told == ["Process 1 of 2 did not call within 0.2 s."]


# The command


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(CONFIG.replace("STEPS", "60"))
    return path


def start(*given, devices=1):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment.pop("XLA_FLAGS", None)
    line = [sys.executable, "-m", *map(str, given)]
    return subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def ended(process, seconds=240):
    """What a process printed, and its exit code."""
    try:
        text = process.communicate(timeout=seconds)[0]
    finally:
        process.kill()
    return text, process.returncode


def pair(config, folder, *given, timeout=60):
    """Two processes of a run, with one device each."""
    where = f"127.0.0.1:{free_port()}"
    more = ("--coordinator", where, "--num-processes", 2, "--peer-timeout", timeout, *given)
    return [
        start(
            "braintrace_flax.train",
            "--config",
            config,
            "--folder",
            folder,
            "--mesh",
            "data=2",
            *more,
            "--process-id",
            i,
        )
        for i in range(2)
    ]


def wait_for_checkpoint(folder, number, processes):
    def there():
        found = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]
        return any(n >= number for n in found) or any(p.poll() is not None for p in processes)

    until(there, 200)


def test_stopped_killed_and_resumed_by_more_and_fewer_processes(config, tmp_path):
    folder, alone = tmp_path / "several", tmp_path / "alone"
    text, code = ended(start("braintrace_flax.train", "--config", config, "--folder", folder, "--steps", 5))
    assert code == 0, text
    more = ("--steps", 100_000)  # what one process has begun, two go on with
    processes = pair(config, folder, *more)
    wait_for_checkpoint(folder, 10, processes)
    processes[1].send_signal(signal.SIGTERM)  # one is preempted: all save
    told = [ended(process) for process in processes]
    assert [code for _, code in told] == [AGAIN, AGAIN], told
    stopped = int(re.search(r"Stopped after step (\d+), saved", told[0][0]).group(1))
    assert (folder / "checkpoints" / str(stopped)).is_dir()

    processes = pair(config, folder, *more)
    wait_for_checkpoint(folder, stopped + 5, processes)
    processes[1].kill()
    text, code = ended(processes[0])
    ended(processes[1])
    assert code == AGAIN, text
    assert "error: Process 1 is gone. This process ends too. Start the run again" in text
    assert f"Going on from step {stopped}." in text

    last = max(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())
    steps = last + 5
    text, code = ended(start("braintrace_flax.train", "--config", config, "--folder", folder, "--steps", steps))
    assert code == 0, text
    text, code = ended(start("braintrace_flax.train", "--config", config, "--folder", alone, "--steps", steps))
    assert code == 0, text
    mine, theirs = (read_records(path / "metrics.jsonl")[-1] for path in (folder, alone))
    assert mine["step"] == theirs["step"] == steps
    np.testing.assert_allclose(mine["test_loss"], theirs["test_loss"], rtol=1e-3)
    assert json.loads((folder / "config.json").read_text())["mesh"] == ""


def test_different_configs_and_a_missing_mesh(config, tmp_path):
    where = f"127.0.0.1:{free_port()}"
    line = ("braintrace_flax.train", "--config", config, "--coordinator", where, "--num-processes", 2)
    processes = [start(*line, "--folder", tmp_path, "--window", 2 + 2 * i, "--process-id", i) for i in range(2)]
    told = [ended(process) for process in processes]
    for text, code in told:
        assert code == 2
        assert "process 1 has window = 4 where process 0 has 2" in text
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--processes", "0", "--", "--config", "x"], "--processes 0: write"),
        (["--cores", "2", "--", "--config", "x"], "--cores 2: write"),
        (["--processes"], "--processes : write"),
        (["--processes", "2"], "What shall they run?"),
    ],
)
def test_the_launcher_refuses_what_it_does_not_know(given, text, capsys):
    assert launch.main(given) == 2
    assert text in capsys.readouterr().err


def test_what_gloo_says_is_left_out_however_its_threads_mix_it(capsys):
    met = "1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    said = [f"[Gloo] Rank {met}", f"[Gloo] Rank [Gloo] Rank {met}", met, f"[Gloo] Rank 0{met}"]
    launch._copy(1, [*said, "[Gloo] Rank step 5/6\n", "\n", "3\n", "Rank 0 is ready\n"], sys.stdout)
    assert capsys.readouterr().out == "[1] step 5/6\n[1] \n[1] 3\n[1] Rank 0 is ready\n"


def test_launched_processes_are_one_run(config, tmp_path, capsys):
    given = ["--config", str(config), "--folder", str(tmp_path), "--mesh", "data=2,model=2", "--steps", "6"]
    assert launch.main(["--processes=2", "--devices-per-process", "2", "--", *given]) == 0
    told = capsys.readouterr().out
    assert "[0] step 5/6" in told
    assert not re.search(r"^\[1\].*[a-z]", told, re.MULTILINE)
    assert (tmp_path / "report.html").is_file()


def test_a_mesh_of_other_size_and_several_processes_without_one(config, tmp_path, capsys):
    given = ["--config", str(config), "--folder", str(tmp_path)]
    assert command.main(lambda c: 0, (), "", [*given, "--mesh", "rows=2"]) == 2
    assert "has an axis 'rows'; axes are data, fsdp, model" in capsys.readouterr().err
    assert command.main(lambda c: 0, (), "", [*given, "--mesh", "data=0"]) == 2
    assert "at least 1 for 'data'" in capsys.readouterr().err
    assert command.main(lambda c: 0, (), "", [*given, "--mesh_kind", "manual"]) == 2
    assert '`mesh_kind` is "auto" or "explicit"' in capsys.readouterr().err


def test_a_cluster_that_is_none(config, tmp_path):
    given = ("--config", config, "--folder", tmp_path, "--coordinator", "auto")
    text, code = ended(start("braintrace_flax.train", *given))
    assert code == 2
    assert text.startswith("error: `--coordinator auto` finds no cluster here")
