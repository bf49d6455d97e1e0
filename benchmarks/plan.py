"""How near `braintrace_flax.plan` comes to the TPU's compiler, in an environment that has it (the extra `tpu`).

    python benchmarks/plan.py [--config configs/pod_gru.py --topology v5p:8x8x8]

Prints the estimate from shapes alone next to the compiler's bytes on one chip, for both configs for pods unless one is
given, and fails if they differ by more than 5 %.
"""

import argparse
import sys

from braintrace_flax.planning.estimate import estimate
from braintrace_flax.planning.table import table
from braintrace_flax.planning.tpu import compile_for, prepare
from braintrace_flax.runs import load_config

PODS = {"configs/pod_gru.py": "v5p:8x8x8", "configs/pod_lru.py": "v5e:16x16"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config")
    parser.add_argument("--topology")
    options = parser.parse_args(arguments)
    cases = {options.config: options.topology} if options.config else PODS
    rows, worst = [], 0.0
    for path, topology in cases.items():
        config = load_config(path)
        need, found = estimate(config), compile_for(config, topology)
        error = need.total / found.needed - 1
        worst = max(worst, abs(error))
        sizes = [f"{size / 2**20:.0f}" for size in (need.total, found.needed, found.arguments, found.temporaries)]
        rows.append([config.name, topology, *sizes, f"{error:+.1%}", f"{found.seconds:.0f}"])
    print(
        table(["config", "topology", "estimate MiB", "compiler MiB", "state", "temporary", "error", "compile s"], rows)
    )
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    prepare()
    sys.exit(main())
