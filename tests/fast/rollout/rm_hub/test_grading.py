import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles.rollout.rm_hub import grading, grading_worker
from miles.rollout.rm_hub.grading import Grader, close_grader, get_grader

FOREVER = "10^{10^{10}}"  # an integer power that no Python signal interrupts

# A worker without the library behind it, so that a test need not wait for sympy's import.
STUB = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["given"] == "hang":
        print("half an answ", end="", flush=True)
        time.sleep(1000)
    if request["given"] == "die":
        break
    print(json.dumps({"equivalent": request["given"] == request["expected"]}), flush=True)
"""


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(grading, "WORKER_ARGUMENTS", ("-S", "-c", STUB))
    grader = Grader(max_workers=1, timeout_secs=60)
    yield grader
    grader.close()


def test_what_never_ends_is_different_and_its_process_is_killed(caplog):
    grader = Grader(max_workers=1, timeout_secs=60)
    try:
        assert grader.equivalent("0.5", "1/2")
        [worker] = grader._idle
        grader.timeout_secs = 0.2
        assert not grader.equivalent(FOREVER, "5")
    finally:
        grader.close()
    assert worker._process.returncode is not None
    assert f"comparing '{FOREVER}' with '5' took more than 0.2 s" in caplog.text


@pytest.mark.parametrize("ending", ["hang", "die"])
def test_a_process_that_fails_is_replaced(stub, caplog, ending):
    assert stub.equivalent("1", "1")
    [worker] = stub._idle
    stub.timeout_secs = 0.1 if ending == "hang" else 60
    assert not stub.equivalent(ending, "1")
    assert worker._process.returncode is not None
    assert "counted as different" in caplog.text
    stub.timeout_secs = 60
    assert stub.equivalent("2", "2")
    assert not stub.equivalent("2", "3")


def test_a_process_that_died_while_idle_is_replaced(stub):
    assert stub.equivalent("1", "1")
    [worker] = stub._idle
    worker._process.kill()
    worker._process.wait()
    assert stub.equivalent("2", "2")


async def test_the_event_loop_goes_on_meanwhile(stub):
    stub.timeout_secs = 0.3
    comparison = asyncio.create_task(stub.equivalent_async("hang", "1"))
    rounds = 0
    while not comparison.done():
        await asyncio.sleep(0.001)
        rounds += 1
    assert not await comparison
    assert rounds > 3


def test_a_repeated_question_is_not_asked_again(stub):
    assert stub.equivalent("1", "1")
    stub.close()
    assert stub.equivalent("1", "1")
    with pytest.raises(RuntimeError, match="the grader is closed"):
        stub.equivalent("2", "2")


def test_closing_ends_a_comparison_under_way(stub):
    assert stub.equivalent("1", "1")
    [worker] = stub._idle
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stub.equivalent, "hang", "1")
        while not stub._busy:
            time.sleep(0.001)
        stub.close()
        with pytest.raises(RuntimeError, match="the grader is closed"):
            asked.result(30)
    assert worker._process.returncode is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("miles-grading")]
    stub.close()


def test_no_more_processes_than_allowed(stub):
    grader = Grader(max_workers=2)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(lambda n: grader.equivalent(str(n), str(n)), range(50)))
        assert 1 <= len(grader._idle) <= 2
        assert not grader._busy
    finally:
        grader.close()


def test_a_process_that_cannot_start_is_an_error(stub, monkeypatch):
    monkeypatch.setattr(grading, "WORKER_ARGUMENTS", ("-c", "raise SystemExit(1)"))
    with pytest.raises(RuntimeError, match="did not start"):
        stub.equivalent("1", "1")
    assert not stub._idle
    assert not stub._busy


def test_processes_end_with_their_parent():
    code = (
        "from miles.rollout.rm_hub import grading\n"
        "from miles.rollout.rm_hub.grading import get_grader\n"
        f"grading.WORKER_ARGUMENTS = ('-S', '-c', {STUB!r})\n"
        "assert get_grader().equivalent('1', '1')\n"
        "print(get_grader()._idle[0]._process.pid, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    pid = int(parent.stdout)
    deadline = time.monotonic() + 15
    while _is_running(pid):
        assert time.monotonic() < deadline, f"grading process {pid} outlived its parent"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_shared_grader_is_one_until_it_is_closed(monkeypatch):
    first = get_grader()
    assert get_grader() is first
    close_grader()
    assert first.closed
    assert get_grader() is not first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert get_grader() not in (first, grading._shared_grader._inherited[0])
    close_grader()


def test_the_worker_answers_odd_input_and_goes_on(monkeypatch):
    monkeypatch.setattr(grading_worker.signal, "alarm", lambda seconds: None)  # pytest-timeout uses the same one

    def ask(given, expected):
        return grading_worker.answer({"given": given, "expected": expected, "limit": 60})

    assert ask("0.5", "1/2") == {"equivalent": True}
    assert ask("\x00", "1")["equivalent"] is False
    assert ask("}{", "{{")["equivalent"] is False
    assert ask("1/0", "1")["equivalent"] is False
