"""Starts worker processes, and waits for what they found."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


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
    environment = {**os.environ, **ENVIRONMENT, "REPLICAS": str(replicas)}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, WORKER, output, job, *arguments]
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


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
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "TF_CONFIG": json.dumps(config),
            "REPLICAS": str(replicas),
        }
        command = [sys.executable, WORKER, output, job, *arguments]
        log = (folder / f"worker_{index}.txt").open("w")
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=log, stderr=log
        )
        started.append((process, output, log))
    found = []
    for process, output, log in started:
        try:
            process.wait(timeout=900)
        finally:
            process.kill()
            log.close()
        if not may_fail:
            assert process.returncode == 0, Path(log.name).read_text()[-4000:]
        found.append(json.loads(output.read_text()) if output.exists() else None)
    return found
