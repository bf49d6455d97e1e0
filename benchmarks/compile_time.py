"""How long compiling takes, against the number of layers: this library and the peer on the same stacks.

A stack is so many GRU cells of one width and a linear readout, a single stream, float32. The two compilers take turns;
each time is the least of several repeats, in seconds of the processor so that other work on the machine matters
little, tracing of the step included, building of the model not. The exponent is the slope of log time over log layers,
fitted to the larger half of the sizes: 1 means linear.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --layers 1 4 16 --repeats 5

Without the peer (`pip install braintrace==0.2.6`) only ours is timed.
"""

import argparse
import gc
import importlib
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

import braintrace_core
from braintrace_core import nn

LAYERS = [1, 2, 4, 8, 16, 32, 64]


class Stack(brainstate.nn.Module):
    """GRU cells and a readout, of either library."""

    def __init__(self, layers: int, width: int, library: Any) -> None:
        super().__init__()
        self.cells = [library.GRUCell(width, width) for _ in range(layers)]
        self.readout = library.Linear(width, 2)

    def update(self, x: Any) -> Any:
        for cell in self.cells:
            x = cell(x)
        return self.readout(x)


def compilers() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Name -> (layers, compiler)."""
    found = {"ours": (nn, braintrace_core.compile_etrace_graph)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            peer = importlib.import_module("braintrace")
        except ImportError:
            return found
    return {**found, "peer": (peer.nn, peer.compile_etrace_graph)}


def seconds(compiler: Callable[..., Any], model: Any, x: Any) -> float:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer warns of every weight that it leaves out; printing takes time
        start = time.process_time()
        compiler(model, x)
        return time.process_time() - start


def measure(layers: int, width: int, repeats: int) -> dict[str, float]:
    """The least time of each compiler, which take turns."""
    x = jnp.zeros(width)
    models = {}
    for name, (library, compiler) in compilers().items():
        model = Stack(layers, width, library)
        brainstate.nn.init_all_states(model)
        models[name] = (compiler, model)
    best = dict.fromkeys(models, math.inf)
    for repeat in range(repeats + 1):
        for name, (compiler, model) in models.items():
            taken = seconds(compiler, model, x)
            if repeat:  # the first time JAX fills caches
                best[name] = min(best[name], taken)
    return best


def exponent(layers: list[int], times: list[float]) -> float:
    """Slope of log time over log layers, over the larger half."""
    half = len(layers) // 2 if len(layers) > 3 else 0
    if len(layers) - half < 2:
        return math.nan
    return float(np.polyfit(np.log(layers[half:]), np.log(times[half:]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="numbers of stacked cells")
    parser.add_argument("--repeats", type=int, default=5, help="how often each size is compiled")
    parser.add_argument("--width", type=int, default=8, help="units of a cell")
    options = parser.parse_args()
    sizes = sorted(options.layers)
    names = list(compilers())
    print(f"{'layers':>6}" + "".join(f"{name + ' / ms':>12}" for name in names) + f"{'ours / peer':>13}")
    times: dict[str, list[float]] = {name: [] for name in names}
    for layers in sizes:
        best = measure(layers, options.width, options.repeats)
        for name in names:
            times[name].append(best[name])
        ratio = f"{best['ours'] / best['peer']:13.2f}" if "peer" in best else f"{'-':>13}"
        print(f"{layers:6d}" + "".join(f"{1e3 * best[name]:12.1f}" for name in names) + ratio, flush=True)
    slopes = {name: exponent(sizes, times[name]) for name in names}
    print("exponent" + "".join(f"  {name} {slope:.2f}" for name, slope in slopes.items()))
    linear = "linear" if slopes["ours"] <= 1.1 else "worse than linear"
    verdict = f"verdict: ours grows with exponent {slopes['ours']:.2f} ({linear})"
    if "peer" in times:
        ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["peer"], strict=True)]
        verdict += f" and takes {ratios[-1]:.2f}x the peer's time at {sizes[-1]} layers (worst {max(ratios):.2f}x)"
    print(verdict)


if __name__ == "__main__":
    main()
