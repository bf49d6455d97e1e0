"""How long the learning rules take, and how much memory, against back-propagation and the peer on the same nets.

    python benchmarks/rules.py --quick
    python benchmarks/rules.py --nets gru256,lif512 --batches 16 --windows 16,32 --json rules.json

In one run and taking turns: D-RTRL with window credit (`window`) and with step credit (`step`) and pp-prop (`pp`); the
peer by default (`peer`, `peer pp`) and in its multi-step mode with the same window (`peer window`); back-propagation
through the whole sequence (`bptt`) and with the carries of only about the root of its steps stored (`sqrt bptt`); and
the time that reading and writing D-RTRL's traces once a window takes (`bound`). `--floors DIR` adds hand-written
kernels from that folder. Every contender is one compiled call over a sequence whose gradients are summed over its
windows, its carry donated. Times are for one step, the least of the repeats; a ratio is to `bptt` of the same run.

On Linux, what is told includes the time for temporary arrays that a call gives back and the next one has cleared again,
above 32 MB; it is a third of back-propagation's where batches are large. Start with `MALLOC_MMAP_MAX_=0
MALLOC_TRIM_THRESHOLD_=100000000000` to leave it out.

Before that, each kind of net runs small, and says where the gradients of peer and floors equal ours. At the end: which
targets were met. Without the peer the others run.
"""

import argparse
import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rules_contenders import PASSES, RULES, bptt, floors, load_floors, ours, passes, plan_of, trace_bytes
from rules_nets import Net, activity
from rules_peer import ALGORITHMS, load_peer, peer
from rules_targets import Check, report, time_checks
from timing import Contender, compile_for, memory, table, take_turns

NETS = "rnn256,rnn512,gru128,gru256,lstm128,lstm256,lif256,lif512,alif512,lru256,gru256x2"
GROUPS = {
    "ours": ["window", "step", "pp"],
    "peer": ["peer", "peer pp", "peer window"],
    "bptt": ["bptt"],
    "sqrt": ["sqrt bptt"],
    "floors": ["floor window", "floor step", "floor pp"],
    "bound": ["bound"],
}
PEER_STEPS = 16  # of its default mode, whose time for a step does not depend on their number
SECONDS = 6.0  # after which a slow contender is not repeated


class Suite:
    """What all nets of a run share: the peer, the floors, and who takes part."""

    def __init__(self, names: list[str], floors: Path | None) -> None:
        self.names = names
        self.peer = load_peer() if any(name.startswith("peer") for name in names) else "not asked for"
        self.floors = None if floors is None else load_floors(floors)

    def runs(self, net: Net, plan: Any, name: str, window: int, data: Any) -> Iterator[Any]:
        """Functions that count as contender `name`: one, or several of which the fastest counts, or none."""
        kind = name.split()[-1]
        if name in RULES:
            yield ours(net, plan, name, window, data)
        elif name in ("bptt", "sqrt bptt"):
            yield bptt(net, data, sqrt=name != "bptt")
        elif name == "bound":
            yield passes(plan, data[0].shape[1])
        elif name.startswith("peer") and not isinstance(self.peer, str):
            kind = "step" if name == "peer" else kind
            try:
                yield peer(self.peer, net, ALGORITHMS[kind], window if kind == "window" else None, data)
            except Exception as error:
                print(f"{net.name}: {name} left out, {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        elif name.startswith("floor") and self.floors is not None:
            yield from floors(self.floors, net, kind, window, data)


def depends_on_window(name: str) -> bool:
    return name in RULES or name.startswith("floor") or name == "peer window"


def measure(suite: Suite, net: Net, batch: int, windows: list[int], steps: int, repeats: int) -> list[dict[str, Any]]:
    """One record for each contender and window (None for those that know no window)."""
    plan, contenders = plan_of(net), []
    if activity(net, net.data(steps, batch)[0]) == 0:
        raise SystemExit(f"{net.name} is silent: its gradients are zero.")
    for name in suite.names:
        length = min(steps, PEER_STEPS) if name in ("peer", "peer pp") else PASSES if name == "bound" else steps
        data = net.data(length, batch)
        for window in windows if depends_on_window(name) else [None]:
            for run in suite.runs(net, plan, name, window or 1, data):
                contenders.append((name, window, Contender.of(*run, length)))
    take_turns([contender for *_, contender in contenders], repeats, SECONDS)
    records: dict[Any, dict[str, Any]] = {}
    for name, window, contender in contenders:
        record = {
            "net": net.name,
            "batch": batch,
            "contender": name,
            "window": window,
            "seconds": contender.least,
            "median": contender.median,
            "steps": contender.steps,
            **memory(contender.compiled),
        }
        known = records.setdefault((name, window), record)
        if record["seconds"] < known["seconds"]:
            records[name, window] = record
    return list(records.values())


def show(net: Net, batch: int, windows: list[int], steps: int, records: list[dict[str, Any]]) -> dict[Any, float]:
    """Print a table of one net and batch; return seconds by contender and window."""
    seconds = {}
    for record in records:
        for window in windows:
            if record["window"] in (None, window):
                bound = record["contender"] == "bound"
                seconds[record["contender"], window] = record["seconds"] / (window if bound else 1)
    rows = []
    for name in dict.fromkeys(record["contender"] for record in records):
        cells = []
        for window in windows:
            now, whole = (seconds.get((who, window), math.nan) for who in (name, "bptt"))
            cells.append(f"{1e6 * now:.0f} ({now / whole:.2f}x)")
        last = [record for record in records if record["contender"] == name][-1]
        sizes = [f"{last[part] / 2**20:.2f}" for part in ("temp", "arguments", "alias")]
        rows.append([name, *cells, *sizes])
    header = ["us / step (x bptt)", *(f"window {window}" for window in windows), "temp MB", "arguments", "donated"]
    rates = [2 * record["alias"] / record["seconds"] for record in records if record["contender"] == "bound"]
    speed = "".join(f"; traces are read and written at {rate / 1e9:.1f} GB/s" for rate in rates)
    print(f"\n{net.name}, batch {batch}, {steps} steps; memory at the last window{speed}")
    print(table(header, rows), flush=True)
    return seconds


def memory_checks(net: Net, batch: int, window: int, steps: int, records: list[dict[str, Any]]) -> Iterator[Check]:
    """Traces no larger than they must be; memory that does not grow with the sequence. Prints what it finds."""
    plan, case, rows = plan_of(net), f"{net.name}, batch {batch}", []
    weights, everything = (size / 2**20 for size in trace_bytes(plan, batch))
    due = net.demanded_trace_bytes(batch) / 2**20
    print(f"traces of weights: {weights:.2f} MB, due {due:.2f}; with the last step's factors {everything:.2f}")
    yield Check("MB of the traces of weights: what D demands", case, weights, due)
    for record in records:
        name = record["contender"]
        if record["window"] not in (None, window) or name not in (*RULES, "bptt", "sqrt bptt"):
            continue
        data = net.data(4 * steps, batch)
        run = ours(net, plan, name, window, data) if name in RULES else bptt(net, data, sqrt=name == "sqrt bptt")
        short, long = record["temp"], memory(compile_for(*run))["temp"]
        rows.append([name, f"{short / 2**20:.2f}", f"{long / 2**20:.2f}", f"{long / short:.2f}x"])
        if name in RULES:
            yield Check("temporary memory at 4T steps: at T steps", f"{case}, {name}", long / short, 1.05)
    print(table([f"temp MB, window {window}", f"{steps} steps", f"{4 * steps} steps", ""], rows), flush=True)


def agreement(suite: Suite, net: Net) -> set[str]:
    """Print where gradients of peer and floors equal ours, on a small net.

    Returns:
      the contenders all of whose do, the small readout's aside.
    """
    net, steps, window, batch, equal = Net(net.kind, 12, net.layers, 16), 8, 4, 3, set()
    plan, data, expected = plan_of(net), net.data(steps, batch), {}
    for name in [name for name in suite.names if name.startswith(("peer", "floor"))]:
        own = "step" if name == "peer" else name.split()[-1]
        for run in suite.runs(net, plan, name, window, data):
            found = Contender.of(*run, steps)()
            if own not in expected:
                expected[own] = Contender.of(*ours(net, plan, own, window, data), steps)()
            same, other = compare(expected[own], found)
            text = f"{net.name}: {name} equals our {own} in {' '.join(same) or 'nothing'}"
            print(text + (f"; differs in {', '.join(other)}" if other else ""), flush=True)
            if all(word.startswith("out.") for word in other):
                equal.add(name)
    return equal


def compare(expected: Any, found: Any) -> tuple[list[str], list[str]]:
    """Names of parameters with equal gradients, and of the others with what is found there."""
    same, other = [], []
    by_path = dict(jax.tree_util.tree_leaves_with_path(found))
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path).removeprefix("cells.")
        got = np.asarray(by_path.get(path, np.zeros(want.shape)), np.float64)
        want = np.asarray(want, np.float64)
        if np.abs(want - got).max() <= 1e-4 * np.abs(want).max():
            same.append(name)
        elif not got.any():
            other.append(f"{name} (none)")
        else:
            other.append(f"{name} ({np.vdot(want, got) / np.vdot(want, want):.2f} times)")
    return same, other


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=words, default=words(NETS), help="kind, units, x layers: gru256,gru256x2")
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64])
    parser.add_argument("--windows", type=numbers, default=[1, 4, 16, 32])
    parser.add_argument("--contenders", type=words, default=list(GROUPS), help=f"of {','.join(GROUPS)}, or one's name")
    parser.add_argument("--inputs", type=int, default=128, help="features of an input")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--floors", type=Path, help="folder of the hand-written kernels")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--quick", action="store_true", help="two nets, one batch, two windows, three repeats")
    if parser.parse_args().quick:
        parser.set_defaults(nets=["gru128", "lif256"], batches=[16], windows=[4, 16], repeats=3)
    options = parser.parse_args()

    names = [name for word in options.contenders for name in GROUPS.get(word, [word])]
    if unknown := set(names) - {name for group in GROUPS.values() for name in group}:
        parser.error(f"no contender {', '.join(sorted(unknown))}")
    steps = math.lcm(*options.windows) * math.ceil(max(64, 2 * max(options.windows)) / math.lcm(*options.windows))
    suite = Suite(names, options.floors)
    if isinstance(suite.peer, str):
        print(f"no peer: {suite.peer}")
    nets = [Net.named(name, options.inputs) for name in options.nets]
    equal = {}
    for net in nets:
        if (net.kind, net.layers) not in equal:
            equal[net.kind, net.layers] = agreement(suite, net)
    records, checks = [], []
    for net in nets:
        for batch in options.batches:
            found = measure(suite, net, batch, options.windows, steps, options.repeats)
            records += found
            seconds = show(net, batch, options.windows, steps, found)
            same_pp = "peer pp" in equal[net.kind, net.layers]
            for window in options.windows:
                now = {name: value for (name, at), value in seconds.items() if at == window}
                checks += time_checks(net, batch, window, now, same_pp)
            gc.collect()
            jax.clear_caches()
        checks += memory_checks(net, options.batches[-1], options.windows[-1], steps, found)
        if options.json:  # after each net, so that a run that is cut short leaves what it found
            results = {"times": records, "checks": [{**check._asdict(), "met": check.met} for check in checks]}
            options.json.write_text(json.dumps(results, indent=1))
    print(f"\n{report(checks)}")


if __name__ == "__main__":
    main()
