"""A heart beats beside whatever its process does, and stops with the process."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from miles.utils.heartbeat import CannotAsk, Heart, hears, own_pid_space, start_heart

LONG_SECS = 20.0
"""Never waited for where the code is right."""

PROCESS = """
import sys
from miles.utils.heartbeat import start_heart
heart = start_heart()
print(heart.host, heart.port, flush=True)
sys.stdin.readline()  # the one other thread waits for ever
"""


def start() -> tuple[subprocess.Popen[str], Heart]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    host, port = process.stdout.readline().split()
    return process, Heart(process.pid, "here", own_pid_space(), host, int(port))


async def test_a_process_answers_while_its_main_thread_waits_and_not_while_it_is_stopped_or_dead() -> None:
    process, heart = await asyncio.to_thread(start)
    try:
        assert await hears(heart, timeout_secs=LONG_SECS)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222 - it has been stopped
        assert not await hears(heart, timeout_secs=0.2)
        process.send_signal(signal.SIGCONT)
        assert await hears(heart, timeout_secs=LONG_SECS)
        process.kill()
        await asyncio.to_thread(process.wait)
        with pytest.raises(ConnectionRefusedError):
            await hears(heart, timeout_secs=LONG_SECS)
    finally:
        process.kill()
        process.communicate()


async def test_whoever_hangs_up_early_does_not_stop_it() -> None:
    process, heart = await asyncio.to_thread(start)
    try:
        for _ in range(20):
            _, writer = await asyncio.open_connection(heart.host, heart.port)
            writer.transport.abort()
        assert await hears(heart, timeout_secs=LONG_SECS)
    finally:
        process.kill()
        process.communicate()


def test_a_process_id_means_something_on_its_own_machine_alone() -> None:
    heart = start_heart()
    assert heart.pid == os.getpid() and heart.is_in_our_pid_space
    assert not replace(heart, pid_space="another boot").is_in_our_pid_space
    assert not replace(heart, pid_space="").is_in_our_pid_space


async def test_who_has_no_descriptor_left_to_ask_with_does_not_call_others_silent() -> None:
    heart = start_heart()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, hard))
    try:
        with pytest.raises(CannotAsk):
            await hears(heart, timeout_secs=LONG_SECS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await hears(heart, timeout_secs=LONG_SECS)
