"""What a round costs on Flower nodes: in this process, on Ray, in a deployment, warm and cold.

    python benchmarks/flower_overhead.py [--rounds 8] [--only in-process,mnist,ray,warm,cold]
    python benchmarks/flower_overhead.py --only scale [--before CHECKOUT] [--cells real:4:64,...]
        [--keep docs/flower_scale.jsonl]

In one process the figure is processor seconds a round (the median, without the first), which
other load on the machine does not change; Ray and deployments are wall-clock seconds, on an idle
machine.  Bytes are what one client is sent and sends in a round.  MNIST is left out where its
files are not found (FEDQUILT_DATA).  Prints one table and which limits hold; ends with 1 if one
does not.  All of it takes about five minutes on two idle cores.

`scale` is rounds against nodes and parameters: `real` nodes are SuperNodes with TLS, keys and the
gate, `here` are nodes of one process.  A cell is KIND:NODES:HIDDEN; hidden units h make 75 h + 10
parameters.  Each is measured by a process of its own, with an earlier checkout (`--before`) and
with this one in turn, `--repeats` times; `--keep` adds each to a file, and `kept_table` makes the
page's table of its lines.  A round of real nodes is split where its slowest node
is: `push` until the server has sent all orders, `poll` until the node's app has its process,
`fork` until the app has its order, `train`, and `pull` until the server has read the reply.
Memory is the largest resident size (VmHWM) of a process; pages that forks share count in each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedquilt.common.errors import DataError
from fedquilt.config import RunConfig, build_config
from fedquilt.experiment.api import run_in_memory
from fedquilt.flower import FlowerSettings, client_app
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.federation import LocalFederation, rounds_of
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.simulate import InProcessGrid, simulate
from fedquilt.flower.template import CHOSEN, FILES, write_app

DIGITS = {"dataset": "digits", "num_clients": 20, "clients_per_round": 1.0, "local_epochs": 1}
MNIST = {"dataset": "mnist", "num_clients": 500, "clients_per_round": 4, "local_epochs": 1}
USUAL = {"mode": "fedavg", "partition": "iid", "availability": "always", "seed": 0}
TASK = "quiltapp/task.py"
HIDDEN = 64  # of the template's model
# Both sides write down when they were where, each line with one call.
STOPWATCH = """
import json
import os
import time


def note(name, round_index, client, at=None):
    line = json.dumps([name, int(round_index), int(client), at or time.time()]) + "\\n"
    path = os.path.join(os.environ["FEDQUILT_FLOWER_OUTPUT"], "stopwatch.jsonl")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)


def forked():
    with open("/proc/self/stat") as file:
        ticks = float(file.read().rpartition(")")[2].split()[19])
    alive = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - alive
"""
CLIENT = """
from flwr.clientapp import ClientApp
from fedquilt.flower import client_app
from quiltapp.stopwatch import forked, note
from quiltapp.task import client_data, make_model

honest = client_app(make_model, client_data)
app = ClientApp()


@app.query()
def query(message, context):
    return honest(message, context)


@app.train()
def train(message, context):
    facts = message.content["config"]
    told = facts["round_index"], facts["client"]
    note("forked", *told, forked())
    note("taken", *told)
    reply = honest(message, context)
    note("trained", *told)
    return reply
"""
SERVER = """
from fedquilt.flower import server_app
from fedquilt.flower.engine import FlowerEngine
from quiltapp.stopwatch import note
from quiltapp.task import make_model, test_data

send, read = FlowerEngine._send, FlowerEngine._read


def _send(self, start, clients, round_index, *given):
    note("began", round_index, -1)
    orders = send(self, start, clients, round_index, *given)
    note("sent", round_index, -1)
    return orders


def _read(self, reply, order, method, traffic, *given):
    result = read(self, reply, order, method, traffic, *given)
    note("read", traffic.round_index, order.client)
    return result


FlowerEngine._send, FlowerEngine._read = _send, _read
app = server_app(make_model, test_data)
"""
MOMENTS = ("began", "sent", "forked", "taken", "trained", "read")
STEPS = ("push", "poll", "fork", "train", "pull")
PROCESSES = ("server", "superlink", "node", "app")


Row = dict[str, Any]


class Clock:
    """Notes the processor's and the wall's time after every round."""

    def __init__(self) -> None:
        self.cpu, self.wall = [time.process_time()], [time.perf_counter()]

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def a_round(self, which: str) -> float:
        times = getattr(self, which)
        steps = [after - before for before, after in itertools.pairwise(times[1:])]
        return statistics.median(steps)


def timed(config: RunConfig, engine: str) -> Clock:
    clock = Clock()
    if engine == "sequential":
        run_in_memory(config.replace(engine=engine), clock)  # `auto` would take steps by hand
    else:
        simulate(config.replace(engine=engine), clock, in_memory=True)
    return clock


def in_one_process(options: dict[str, Any], rounds: int, repeats: int) -> dict[str, float]:
    """Return processor seconds a round, the engines in turn, the best of a few repeats."""
    config = build_config({**USUAL, **options, "num_rounds": rounds, "eval_every": 10**6})
    seconds: dict[str, list[float]] = {"sequential": [], "flower": []}
    for _ in range(repeats):
        for engine, taken in seconds.items():
            taken.append(timed(config, engine).a_round("cpu"))
    return {engine: min(taken) for engine, taken in seconds.items()}


class Watch(threading.Thread):
    """Notes memory and processor time of a federation's processes while a run goes on."""

    def __init__(self, federation: LocalFederation) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = dict.fromkeys(PROCESSES, 0)
        self._federation, self._over = federation, threading.Event()
        self._seconds: dict[int, float] = {}

    def run(self) -> None:
        """Look until told to stop."""
        while not self._over.wait(0.05):
            self._look()

    def stop(self) -> float:
        """End; return processor seconds a round, of all processes together."""
        self._over.set()
        if self.is_alive():
            self.join()
        first, last = min(self._seconds, default=0), max(self._seconds, default=0)
        return (self._seconds[last] - self._seconds[first]) / max(1, last - first) if last else 0.0

    def _look(self) -> None:
        jobs = (self._federation.status() or {"processes": {}})["processes"]
        seconds = 0.0
        for name, job in jobs.items():
            for pid in (job["pid"], *children(job["pid"])):
                kind = _kind(name, pid == job["pid"])
                if kind in self.peaks:
                    self.peaks[kind] = max(self.peaks[kind], peak_of(pid))
            # Of dead children, a node's apps, the parent knows; the server's app is alive.
            mine = [job["pid"], *(children(job["pid"]) if name == "serverapp" else ())]
            seconds += sum(map(processor_of, mine))
        run = self._federation.last_run()
        done = rounds_of(run) if run and (run / "rounds.jsonl").exists() else 0
        if done:
            self._seconds.setdefault(done, seconds)


def _kind(job: str, is_parent: bool) -> str:
    """Return which figure a process belongs to."""
    if job == "serverapp":
        return "" if is_parent else "server"
    if job.endswith(".app"):
        return "" if is_parent else "app"
    return job if job in ("superlink", "gate") else "node"


def children(pid: int | None) -> list[int]:
    """Return the children of a process."""
    try:
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def peak_of(pid: int) -> int:
    """Return the largest resident size of a process so far, in MB; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM")), 0)


def processor_of(pid: int | None) -> float:
    """Return the processor seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / float(os.sysconf("SC_CLK_TCK"))


def task_with(hidden: int) -> str:
    """Return the template's task, its model with so many hidden units."""
    wide = FILES[TASK].replace("(64, 64)", f"(64, {hidden})")
    return wide.replace("(64, 10)", f"({hidden}, 10)")


def deployed(folder: Path, rounds: int, warm: bool, nodes: int = 4, hidden: int = HIDDEN) -> Row:
    """Return wall seconds, bytes and memory of rounds of the template's app on real nodes."""
    files = {
        "quiltapp/stopwatch.py": STOPWATCH,
        "quiltapp/client_app.py": CLIENT,
        "quiltapp/server_app.py": SERVER,
        TASK: task_with(hidden),
    }
    chosen = {"num_rounds": rounds, "eval_every": rounds, "flower_min_nodes": nodes}
    app = write_app(folder / "app", files, **chosen)
    federation = LocalFederation(folder / "federation")
    federation.prepare(app, nodes, warm=warm)
    watch = Watch(federation)
    try:
        federation.up(300)
        watch.start()
        if federation.run() != 0:
            log = (federation.folder / "logs" / "serverapp.log").read_text()
            raise SystemExit(f"the run failed: {log[-600:]}")
        run = federation.wait(seconds=1200)
    finally:
        processor = watch.stop()
        federation.down()
    lines = [json.loads(line) for line in (run / "nodes.jsonl").read_text().splitlines()]
    totals = [line for line in lines if "asked" in line][1:]
    if any(line["answered"] < nodes for line in totals):
        raise SystemExit("a node did not answer: the figures are of another number of nodes")
    split = split_of(run.parent / "stopwatch.jsonl")
    return {
        "seconds": statistics.median(line["seconds"] for line in totals),
        "processor": processor,
        "up": totals[-1]["bytes_up"] // nodes,
        "down": totals[-1]["bytes_down"] // nodes,
        "memory": [watch.peaks[kind] for kind in PROCESSES],
        "split": [statistics.median(seconds) for seconds in zip(*split, strict=True)],
    }


def split_of(path: Path) -> list[list[float]]:
    """Return the seconds of `STEPS` in each round but the first, where its slowest node is."""
    at: dict[int, dict[tuple[str, int], float]] = defaultdict(dict)
    for name, index, client, when in map(json.loads, path.read_text().splitlines()):
        at[index][name, client] = when
    found = []
    for index in sorted(at)[1:]:
        seen = at[index]
        last = max((key for key in seen if key[0] == "read"), key=lambda key: seen[key])[1]
        moments = [seen[name, -1 if name in MOMENTS[:2] else last] for name in MOMENTS]
        found.append([after - before for before, after in itertools.pairwise(moments)])
    return found


class TimedGrid(InProcessGrid):
    """Nodes of this process; notes when orders of a round are sent."""

    def push_messages(self, messages: Any) -> Any:
        """Send orders."""
        self.times.append((time.perf_counter(), time.process_time()))
        return super().push_messages(messages)

    times: ClassVar[list[tuple[float, float]]] = []


def in_this_process(nodes: int, hidden: int, rounds: int) -> Row:
    """Return what rounds of the template's app with nodes of this process cost."""
    names: dict[str, Any] = {}
    exec(task_with(hidden), names)
    grid = TimedGrid(client_app(names["make_model"], names["client_data"]), nodes)
    options = {"mode": "fedavg", **CHOSEN, "num_rounds": rounds, "eval_every": rounds}
    places = PlaceRegistry(grid, nodes)
    with tempfile.TemporaryDirectory() as folder:
        run_on_grid(
            grid, places, names["make_model"], names["test_data"], options, FlowerSettings(),
            output_dir=folder,
        )  # fmt: skip
    steps = [
        [after - before for before, after in zip(*pair, strict=True)]
        for pair in itertools.pairwise(grid.times[1:])
    ]
    seconds, processor = (statistics.median(taken) for taken in zip(*steps, strict=True))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    size = 4 * (75 * hidden + 10)
    return {
        "seconds": seconds, "processor": processor, "up": size, "down": size,
        "memory": [own, None, None, None], "split": [None] * len(STEPS),
    }  # fmt: skip


def one_cell(cell: str, rounds: int) -> Row:
    """Measure a cell of the table in this process."""
    kind, nodes, hidden = cell.split(":")
    if kind == "here":
        return in_this_process(int(nodes), int(hidden), rounds)
    with tempfile.TemporaryDirectory() as folder:
        return deployed(Path(folder), rounds, True, int(nodes), int(hidden))


SCALE = [
    *(f"real:{nodes}:64" for nodes in (2, 4, 8, 16)),
    *(f"real:4:{hidden}" for hidden in (13333, 133333)),
    *(f"here:{nodes}:64" for nodes in (4, 50, 200)),
    *(f"here:4:{hidden}" for hidden in (13333, 133333)),
]
SCALE_HEADERS = [
    *("", "nodes", "parameters", "of", "s a round", "processor", *STEPS),
    *("bytes each way", *(f"{kind} MB" for kind in PROCESSES)),
]


KEPT_HEADERS = (
    *("where", "nodes", "parameters", "of", "load", "s a round", "processor s"),
    *("order sent", "app begun", "order read", "trained", "reply read"),
    *("bytes each way", *(f"{kind} MB" for kind in PROCESSES)),
)


def kept_table(lines: Iterable[Row]) -> str:
    """Return the table of measured cells, for a page: of each the newest line."""
    newest = {(line["cell"], line["of"]): line for line in lines}
    order = [(cell, name) for cell in SCALE for name in ("before", "now")]
    rows = []
    for key in (key for key in order if key in newest):
        line = newest[key]
        kind, nodes, hidden = line["cell"].split(":")
        seconds = (line["seconds"], line["processor"], *line["split"])
        rows.append(
            [
                {"real": "TLS, keys, gate", "here": "one process"}[kind],
                *(nodes, f"{75 * int(hidden) + 10:,}", line["of"], f"{line['load']:.0f}"),
                *("" if value is None else f"{value:.2g}" for value in seconds),
                f"{line['up']:,}",
                *("" if value is None else str(value) for value in line["memory"]),
            ]
        )
    lined = [KEPT_HEADERS, ["---"] * len(KEPT_HEADERS), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lined)


def measured(cell: str, checkout: Path, rounds: int) -> Row | None:
    """Measure a cell with the package of a checkout; None, and a word why, where it fails."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, __file__, "--cell", cell, "--rounds", str(rounds)]
    ended = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    if ended.returncode:
        print(f"{cell} of {checkout}: {ended.stderr[-600:]}", flush=True)
        return None
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def scale_rows(given: argparse.Namespace) -> list[list[Any]]:
    """Return the rows of the scale table, earlier and present checkouts in turn."""
    here = Path(__file__).resolve().parents[1]
    checkouts = {"before": given.before, "now": here} if given.before else {"now": here}
    rows = []
    for cell in given.cells.split(","):
        found: dict[str, list[Row]] = {name: [] for name in checkouts}
        for _ in range(given.repeats):
            for name, checkout in checkouts.items():
                one = measured(cell, checkout, given.rounds)
                found[name] += [] if one is None else [one]
                load = round(os.getloadavg()[0], 1)
                print(f"{cell} {name}: {one}; load {load}", flush=True)
                if one is not None and given.keep:
                    facts = {"cell": cell, "of": name, "rounds": given.rounds, "load": load, **one}
                    with given.keep.open("a") as kept:
                        kept.write(json.dumps(facts) + "\n")
        rows += [scale_row(cell, name, taken) for name, taken in found.items() if taken]
    return rows


def scale_row(cell: str, name: str, taken: list[Row]) -> list[Any]:
    """Return a row: medians of the repetitions, and of memory the most."""
    kind, nodes, hidden = cell.split(":")

    def middle(values: Iterable[Any]) -> Any:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return [
        {"real": "TLS, keys, gate", "here": "one process"}[kind],
        int(nodes),
        75 * int(hidden) + 10,
        name,
        *(middle(one[key] for one in taken) for key in ("seconds", "processor")),
        *(middle(values) for values in zip(*(one["split"] for one in taken), strict=True)),
        taken[-1]["up"],
        *(max(x) if x[0] else None for x in zip(*(one["memory"] for one in taken), strict=True)),
    ]


HEADERS = ["", "clock", "s a round", "times", "bytes down", "bytes up"]
# What is promised: the row, the figure's column, the most it may be.
LIMITS = (
    ("in-process, digits", 3, 1.4),
    ("in-process, MNIST CNN", 3, 1.1),
    ("deployment, warm, 4 nodes", 2, 6.0),
    ("deployment, warm, 4 nodes", 3, 1 / 2.5),
)


def one_process_rows(
    name: str, options: dict[str, Any], given: argparse.Namespace
) -> list[list[Any]]:
    try:
        seconds = in_one_process(options, given.rounds, given.repeats)
    except DataError as error:
        print(f"{name} left out: {error}")
        return []
    base = seconds["sequential"]
    over = seconds["flower"] / base
    return [
        [f"sequential, {name}", "cpu", base, 1.0],
        [f"in-process, {name}", "cpu", seconds["flower"], over],
    ]


def ray_rows(rounds: int) -> list[list[Any]]:
    config = build_config({**USUAL, **DIGITS, "num_rounds": rounds})
    base = timed(config, "sequential").a_round("wall")
    began = time.perf_counter()
    clock = timed(config, "flower-ray")
    start = clock.wall[1] - began
    seconds = clock.a_round("wall")
    return [
        ["sequential, digits", "wall", base, 1.0],
        [
            f"Ray, digits ({start:.0f} s until the first round is done)",
            "wall",
            seconds,
            seconds / base,
        ],
    ]


def deployment_rows(kinds: list[str], rounds: int) -> list[list[Any]]:
    """Return the rows of deployments; `times` is over the cold one."""
    found = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            # A cold round takes long, and fewer say as much.
            count = rounds if kind == "warm" else max(3, rounds // 2)
            found[kind] = deployed(Path(folder), count, kind == "warm")
    cold = found.get("cold", {}).get("seconds")
    return [
        [
            f"deployment, {kind}, 4 nodes",
            "wall",
            one["seconds"],
            None if cold is None else one["seconds"] / cold,
            one["down"],
            one["up"],
        ]
        for kind, one in found.items()
    ]


def limits_hold(rows: list[list[Any]]) -> bool:
    """Say of every limit whose row is there whether it holds."""
    by_name = {row[0]: row for row in rows}
    held = []
    for name, column, most in LIMITS:
        value = by_name[name][column] if name in by_name else None
        if value is not None:
            held.append(value <= most)
            what = f"{name}, {HEADERS[column]}: {value:.3f}, at most {most:g}"
            print(f"{'ok  ' if held[-1] else 'FAIL'} {what}")
    return all(held)


def shown(headers: list[str], rows: list[list[Any]]) -> str:
    """Return a table of texts and numbers."""
    from fedquilt.common.formatting import text_table  # an earlier checkout has it elsewhere

    texts = [[_shown(cell) for cell in row] for row in rows]
    return text_table(headers, texts, right=range(1, len(headers)))


def _shown(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="in-process,mnist,ray,warm,cold")
    parser.add_argument("--cells", default=",".join(SCALE))
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--keep", type=Path, help="a file to which what is measured is added")
    parser.add_argument("--cell", help="print the figures of one, for the process that asks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.cell:
        print(json.dumps(one_cell(given.cell, given.rounds)))
        return
    if given.only == "scale":
        print(shown(SCALE_HEADERS, scale_rows(given)))
        return
    wanted = given.only.split(",")
    rows: list[list[Any]] = []
    for key, name, options in (("in-process", "digits", DIGITS), ("mnist", "MNIST CNN", MNIST)):
        if key in wanted:
            rows += one_process_rows(name, options, given)
    if "ray" in wanted:
        rows += ray_rows(given.rounds)
    rows += deployment_rows([kind for kind in ("warm", "cold") if kind in wanted], given.rounds)
    print(shown(HEADERS, [[*row, *[None] * (len(HEADERS) - len(row))] for row in rows]))
    sys.exit(0 if limits_hold(rows) else 1)


if __name__ == "__main__":
    main()
