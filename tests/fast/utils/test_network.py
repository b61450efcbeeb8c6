import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from miles.utils.network import (
    _wrap_ipv6,
    find_available_port,
    get_host_info,
    is_port_available,
    router_worker_base_urls,
    terminate_process,
    wait_for_server_ready,
)


@pytest.fixture
def listener():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


class TestPorts:
    def test_a_port_in_use_is_not_available(self, listener):
        assert not is_port_available(listener)
        assert not is_port_available(-1)
        assert not is_port_available(70000)

    def test_finds_a_free_port(self):
        assert is_port_available(find_available_port())

    def test_finds_the_first_free_port_from_a_base(self, listener):
        assert find_available_port(listener) > listener

    def test_says_when_there_is_none(self, monkeypatch):
        monkeypatch.setattr("miles.utils.network.is_port_available", lambda port, host: False)
        with pytest.raises(RuntimeError, match="no port from 65530 to 65535"):
            find_available_port(65530)


class TestHostInfo:
    def test_the_environment_sets_the_address(self, monkeypatch):
        monkeypatch.setenv("MILES_HOST_IP", "10.1.2.3")
        assert get_host_info() == (socket.gethostname(), "10.1.2.3")

    def test_is_an_address_of_this_machine(self, monkeypatch):
        monkeypatch.delenv("MILES_HOST_IP", raising=False)
        assert is_port_available(0, get_host_info()[1])

    @pytest.mark.parametrize(("prefer", "address"), [("0", "10.0.0.1"), ("1", "fd00::1")])
    def test_ipv6_on_request(self, monkeypatch, prefer, address):
        monkeypatch.delenv("MILES_HOST_IP", raising=False)
        monkeypatch.setenv("MILES_PREFER_IPV6", prefer)
        addresses = {socket.AF_INET: "10.0.0.1", socket.AF_INET6: "fd00::1"}
        monkeypatch.setattr("miles.utils.network._outgoing_address", addresses.get)
        assert get_host_info()[1] == address

    def test_without_a_network_it_is_loopback(self, monkeypatch):
        monkeypatch.delenv("MILES_HOST_IP", raising=False)
        monkeypatch.setattr("miles.utils.network._outgoing_address", lambda family: None)
        assert get_host_info()[1] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "in_url"),
    [("fd00::1", "[fd00::1]"), ("[fd00::1]", "[fd00::1]"), ("10.0.0.1", "10.0.0.1"), ("node-1", "node-1")],
)
def test_ipv6_addresses_are_wrapped(host, in_url):
    assert _wrap_ipv6(host) == in_url


@pytest.mark.parametrize(
    "workers",
    [
        {"workers": [{"url": "http://a:1@0"}, {"url": "http://a:1@1"}, {"url": "http://b:2"}], "total": 3},
        {"urls": ["http://a:1", "http://b:2", "http://a:1"]},
        ["http://a:1@0", "http://b:2@12"],
        [{"url": "http://a:1"}, {"url": "http://b:2"}],
    ],
)
def test_worker_urls_lose_their_ranks_and_duplicates(workers):
    assert router_worker_base_urls(workers) == ["http://a:1", "http://b:2"]


def test_an_at_sign_that_is_no_rank_stays():
    assert router_worker_base_urls(["http://user@host:1"]) == ["http://user@host:1"]


class TestWaitForServerReady:
    def test_returns_when_something_listens(self, listener):
        wait_for_server_ready("127.0.0.1", listener)

    def test_gives_up_after_the_timeout(self):
        with pytest.raises(TimeoutError, match=r"after 0\.05 s"):
            wait_for_server_ready("127.0.0.1", find_available_port(), timeout=0.05)

    def test_a_process_that_has_exited_ends_the_wait(self):
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        process.wait(30)
        with pytest.raises(RuntimeError, match="exited with code 7"):
            wait_for_server_ready("127.0.0.1", find_available_port(), process, timeout=1000)

    def test_waits_for_a_server_that_comes_later(self):
        port = find_available_port()
        servers = []
        timer = threading.Timer(0.05, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
        timer.start()
        wait_for_server_ready("127.0.0.1", port, timeout=30)
        timer.join()
        servers[0].close()


STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"


class TestTerminateProcess:
    def test_ends_a_process(self):
        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        assert terminate_process(process) == -signal.SIGTERM
        assert terminate_process(process) == -signal.SIGTERM

    def test_kills_one_that_ignores_it(self):
        with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            assert terminate_process(process, timeout=0.05) == -signal.SIGKILL

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
    def test_ends_a_multiprocessing_process(self):
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        assert terminate_process(process) is None  # never started
        process.start()
        try:
            assert terminate_process(process) == -signal.SIGTERM
            with pytest.raises(ProcessLookupError):
                os.kill(process.pid, 0)
        finally:
            process.close()
