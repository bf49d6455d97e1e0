"""Weak scaling by the word of the TPU's compiler, in an environment that has it (the extra `tpu`).

    python benchmarks/weak_scaling.py [--network gru] [--chips 4,16,64,256,512] [--examples 8] [--units 512]

The same work for each of 4 to 512 chips, the batch divided among them: pp-prop on a GRU layer, or D-RTRL on an LRU
layer. Bytes and matrix products of a chip are to stay as they are; what it sends tends to twice the gradient. Prints a
table, then the time of a window at the published peak of the chip for up to 1,024 chips, on paper: nothing of this was
run on hardware.
"""

import argparse
import json
from pathlib import Path

from braintrace_flax.planning.chips import chip_of
from braintrace_flax.planning.table import table
from braintrace_flax.planning.tpu import Compiled, compile_for, prepare
from braintrace_flax.runs import GRU, LRU, Config
from braintrace_flax.tasks import Text

SHAPES = {
    4: "v5p:2x2x1",
    8: "v5p:2x2x2",
    16: "v5p:2x2x4",
    32: "v5p:2x4x4",
    64: "v5p:4x4x4",
    128: "v5p:4x4x8",
    256: "v5p:4x8x8",
    512: "v5p:8x8x8",
}


def config_of(name: str, chips: int, examples: int, units: int) -> Config:
    """So many examples on each of so many chips."""
    network, rule = (GRU(units), "pp_prop") if name == "gru" else (LRU(units, units, layers=1), "d_rtrl")
    task, mesh = Text(length=32), f"data={chips}"
    return Config("weak", task, network, rule=rule, window=16, batch_size=chips * examples, mesh=mesh)


def row_of(chips: int, found: Compiled) -> list[str]:
    mib = 2**20
    reduced = sum(c.kind == "all-reduce" and c.bytes > 1024 for c in found.collectives)
    return [
        str(chips),
        f"{found.arguments / mib:.2f}",
        f"{found.temporaries / mib:.2f}",
        f"{found.flops / 1e9:.3f}",
        f"{found.bytes_accessed / mib:.1f}",
        f"{found.sent / mib:.2f}",
        str(reduced),
        f"{found.seconds:.0f}",
    ]


def on_paper(found: Compiled, counts: list[int], name: str) -> list[list[str]]:
    """The time of a window at the peak of a chip, for other numbers of chips: only what is sent changes."""
    chip = chip_of(name)
    whole = [c for c in found.collectives if c.bytes > 1024]
    rows = []
    for chips in counts:
        sent = sum(c._replace(group=chips).sent for c in whole) / found.windows
        work, memory, links = found.flops / chip.flops, found.bytes_accessed / chip.bandwidth, sent / chip.links
        times = [f"{1e6 * seconds:.1f}" for seconds in (work, memory, links, max(work, memory) + links)]
        share = max(work, memory) / (max(work, memory) + links)
        rows.append([str(chips), *times, f"{share:.0%}"])
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["gru", "lru"], default="gru")
    parser.add_argument("--chips", default="4,16,64,256,512")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = {}
    for chips in map(int, options.chips.split(",")):
        found[chips] = compile_for(config_of(options.network, chips, options.examples, options.units), SHAPES[chips])
        print(f"compiled for {chips} chips", flush=True)
    header = ["chips", "state MiB", "temporary MiB", "GFLOP", "memory MiB", "sent MiB", "reductions", "compile s"]
    print(table(header, [row_of(chips, each) for chips, each in found.items()]), end="\n\n")
    print("A window at the published peak, in microseconds, on paper:")
    header = ["chips", "products", "memory", "links", "nothing at once", "not waiting"]
    print(table(header, on_paper(found[max(found)], [4, 16, 64, 256, 512, 1024], "v5p")))
    kept = ("arguments", "temporaries", "flops", "bytes_accessed", "sent", "seconds")
    result = [{"chips": chips, **{key: getattr(each, key) for key in kept}} for chips, each in found.items()]
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    prepare()
    main()
