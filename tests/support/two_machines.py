"""Two machines of two ranks each, as two torchrun agents on this machine, against one machine of four ranks.

rank_scripts/elastic.py trains 24 updates with FSDP2, saves after each, and resumes when it starts.
What each rank holds at the end (parameters, optimizer state, random numbers) must be equal bit for bit: over
two machines; and when one agent and its ranks are killed (SIGKILL), and the agent is started again, so that
torchrun restarts all ranks. If the agent does not come back, torchrun goes on with the other machine's two
ranks: the job must resume there with the samples that are left, and finish. All addresses are of the loopback
device.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from memfit.train.resume.state_file import load_state_file
from support.rank_rows import Row

JOB = Path(__file__).with_name("rank_scripts") / "elastic.py"
SECONDS = 180
UPDATES = 24


def rows(each: int = 2, *, kills: bool = True) -> Iterator[Row]:
    """Run the jobs, with so many ranks per machine; without ``kills``, only those that nothing interrupts."""
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name, "whole")
        code = _wait([_agent(whole, 1, 2 * each, _free_port())])
        wanted = _results(whole)
        yield _row(f"one machine, {2 * each} ranks", wanted, wanted, code)
        two = Path(name, "two")
        port = _free_port()
        code = _wait([_agent(two, 2, each, port) for _ in range(2)])
        what = f"two machines, {each} rank{'s' * (each != 1)} each"
        yield _row(what, _results(two), wanted, code)
        if kills:
            for job, comes_back in (("killed and restarted", True), ("killed", False)):
                folder = Path(name, job)
                code = _interrupted(folder, comes_back=comes_back)
                found = _results(folder)
                row = _row(f"two machines, one {job}", found, wanted, code, comes_back=comes_back)
                if found and not int(found[0].split()[1]):
                    row = Row(row.cells, "the job did not resume, but began again")
                yield row


def _row(job: str, found: list[str], wanted: list[str], code: int, *, comes_back: bool = True) -> Row:
    if code or not found:
        return Row((job, *["-"] * 4), f"torchrun ended with {code}")
    ranks, resumed, updates, _ = found[0].split()
    digests, expected = ([each.split()[-1] for each in results] for results in (found, wanted))
    equal = digests == expected
    failure = "" if equal or not comes_back else "not equal bit for bit"
    # Two ranks need twice as many updates for the samples that are left.
    if not comes_back and not (ranks == "2" and int(resumed) and int(updates) == 2 * UPDATES - int(resumed)):
        failure = "did not go on with two ranks and the samples that were left"
    what = ("yes" if equal else "no") if comes_back else "other batches"
    return Row((job, ranks, resumed, updates, what), failure)


def _interrupted(folder: Path, *, comes_back: bool) -> int:
    """Kill an agent and its ranks in mid-training; return the exit code of the last agents."""
    port = _free_port()
    options = ("--max-restarts", "3", "--rdzv-conf", "last_call_timeout=20")
    stays = _agent(folder, "1:2", 2, port, *options, pause=0.05)
    _until(lambda: _listens(port))
    killed = _agent(folder, "1:2", 2, port, *options, pause=0.05)
    _until(lambda: _saved(folder) >= UPDATES // 3)
    _kill(killed)
    agents = [stays]
    if comes_back:
        agents.append(_agent(folder, "1:2", 2, port, *options, pause=0.05))
    return _wait(agents)


def _agent(
    folder: Path, nodes: int | str, ranks: int, port: int, *options: str, pause: float = 0.0
) -> "subprocess.Popen[bytes]":
    """Start a machine's agent."""
    folder.mkdir(exist_ok=True)
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "memfit")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *rendezvous, "--local-addr", "127.0.0.1"),
        *("--nnodes", f"{nodes}", "--nproc-per-node", f"{ranks}", *options),
        *(JOB, folder, "--pause", f"{pause}"),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Without it, a new agent waits in vain for an address that those of the former round do not send
        # again (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, PyTorch 2.14).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _kill(agent: "subprocess.Popen[bytes]") -> None:
    """Kill an agent and its ranks, as when a machine fails: the agent's end alone leaves them running."""
    os.kill(agent.pid, signal.SIGSTOP)  # it must not see its ranks end
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == agent.pid:
                os.kill(int(status.parent.name), signal.SIGKILL)
    agent.kill()
    agent.wait()


def _wait(agents: "list[subprocess.Popen[bytes]]") -> int:
    """Wait for agents; return the first exit code that is not 0."""
    until = time.monotonic() + SECONDS
    try:
        codes = [agent.wait(max(0.1, until - time.monotonic())) for agent in agents]
    except subprocess.TimeoutExpired:
        codes = [-signal.SIGALRM]
    finally:
        for agent in agents:
            if agent.poll() is None:
                _kill(agent)
    return next((code for code in codes if code), 0)


def _results(folder: Path) -> list[str]:
    """Return what the ranks of a finished job wrote, in their order."""
    return [path.read_text() for path in sorted(folder.glob("result-*"))]


def _saved(folder: Path) -> int:
    """Return after which update a job has saved last."""
    path = folder / "run"
    return load_state_file(path)["run"]["optimizer_step"] if path.exists() else 0


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


def _listens(port: int) -> bool:
    with socket.socket() as test:
        return test.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as test:
        test.bind(("127.0.0.1", 0))
        return int(test.getsockname()[1])
