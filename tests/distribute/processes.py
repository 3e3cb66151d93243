"""Starts worker processes, and waits for what they found."""

import json
import socket
from pathlib import Path

from tests import forks

WORKER = Path(__file__).with_name("worker.py")
LONGEST_SECONDS = 900


def free_ports(number):
    """Find ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_mirrored(folder, job, *arguments, replicas=2):
    """Run a job on several logical devices of one process, and return its result."""
    output = folder / "mirrored.json"
    environment = {"REPLICAS": str(replicas), "TF_CONFIG": None}
    process, printed = _started(folder, 0, environment, output, job, *arguments)
    _wait(process)
    assert process.exitcode == 0, printed.read_text()[-4000:]
    return json.loads(output.read_text())


def _started(folder, number, environment, *arguments):
    """Start a worker; return its process, and the file of its errors."""
    printed = folder / f"printed_{number}"
    printed.mkdir(exist_ok=True)
    process = forks.start(WORKER, *arguments, output=printed, environment=environment)
    return process, printed / "stderr"


def _wait(process):
    try:
        process.join(LONGEST_SECONDS)
    finally:
        process.kill()
    process.join()


def run_workers(folder, job, *arguments, workers=2, replicas=1, may_fail=False):
    """Run a job in several processes on this machine.

    Returns:
        What each found; None for one that found nothing, if it may fail.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    started = []
    for index in range(workers):
        output = folder / f"worker_{index}.json"
        output.unlink(missing_ok=True)
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        environment = {"TF_CONFIG": json.dumps(config), "REPLICAS": str(replicas)}
        process, printed = _started(folder, index, environment, output, job, *arguments)
        started.append((process, output, printed))
    found = []
    for process, output, printed in started:
        _wait(process)
        if not may_fail:
            assert process.exitcode == 0, printed.read_text()[-4000:]
        found.append(json.loads(output.read_text()) if output.exists() else None)
    return found
