"""What a run will need, before it runs: ``python -m braintrace_flax.plan --config configs/pod_lru.py --mesh data=64``.

Prints bytes on each device for several rules and windows, next to BPTT; the largest batch that fits; and advice. Any
setting of the config can be given as ``--name value``. Nothing is allocated.

  --chip NAME          whose memory it must fit into: v4, v5e (unless given), v5p, v6e.
  --topology NAME      compile for these chips, such as v5p:8x8x8, with the TPU's own compiler (the extra `tpu`):
                       memory, work, every collective, and the time of a window at the published peak. No TPU is needed.
  --json FILE          write all of it there too.

The exit code is 0 if it fits, 1 if it does not, 2 if something asked for is not to be had.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from .planning.advice import USABLE, advise, compare
from .planning.chips import chip_of
from .planning.table import as_json, compiled_lines, rows_table
from .planning.tpu import compile_for, devices_of, prepare
from .runs.command import Command, parse
from .runs.config import ConfigError

__all__: list[str] = []

OPTIONS = ("topology", "chip", "json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and plan; what a user can get wrong is one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    try:
        rest, options = _split(arguments)
        return _plan(parse(rest), options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _plan(command: Command, options: dict[str, str]) -> int:
    config, topology = command.config, options.get("topology", "")
    chip = chip_of(topology or options.get("chip", "v5e"))
    if topology:
        devices_of(topology, config.mesh)
    task, network = config.task, config.network
    shapes = jax.eval_shape(
        network.build(task.num_inputs, task.num_outputs, task.is_tokens).init, jax.eval_shape(lambda: jax.random.key(0))
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    print(f"{config.name}: {count:,} parameters, batch {config.batch_size}, sequences of {task.steps}")
    print(f"On each device ({config.mesh or 'one'}; {chip.name}), from shapes alone:\n")
    rows = compare(config, int(chip.memory * USABLE))
    print(rows_table(rows))
    advice = advise(config, chip, rows[0], rows)
    print("", *advice, sep="\n")
    found = compile_for(config, topology) if topology else None
    if found is not None:
        print("", *compiled_lines(rows[0].need, found, chip), sep="\n")
    if "json" in options:
        path = Path(options["json"])
        path.write_text(json.dumps(as_json(config, chip, rows, advice, found), indent=2) + "\n", encoding="utf-8")
    fits = rows[0].need.total <= chip.memory * USABLE if found is None else found.fits
    return 0 if fits else 1


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments of a config, and the plan's own."""
    rest: list[str] = []
    options: dict[str, str] = {}
    given = list(arguments)
    while given:
        word = given.pop(0)
        name, is_given, value = word.removeprefix("--").partition("=")
        if name not in OPTIONS or not word.startswith("--"):
            rest.append(word)
            continue
        if not is_given and not given:
            raise ConfigError(f"`--{name}` needs a value.")
        options[name] = value if is_given else given.pop(0)
    return rest, options


if __name__ == "__main__":
    prepare()
    sys.exit(main())
