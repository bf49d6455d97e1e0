"""How JAX and Hypothesis behave under test. Loaded before any test module, hence before any JAX backend starts.

Tests run strictly: float64 is available, dtypes and ranks never promote silently. Doctests of the packages run with
JAX's defaults instead, so that they show what a user will see.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import brainstate  # noqa: F401 - before the settings below: brainstate 0.5 resets jax_enable_x64 when imported
import hypothesis
import jax
import numpy as np
import pytest

# Most of a test's time is compilation: machine code need not be fast.
QUICK_TO_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # every core has a worker already
]
if jax.__version_info__ < (0, 11):  # a process with a flag that it does not know ends at once
    QUICK_TO_COMPILE += ["--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_TO_COMPILE]).strip()

# What one test has compiled, others need not compile again, in whatever process: workers and those that tests start.
# Set JAX_COMPILATION_CACHE_DIR to keep it for the next run. Programs for several devices are never kept: XLA's CPU
# backend forgets the order of collectives when it writes one, and devices that take them in turn then wait for ever.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", compiled)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled


def keep_compiled_after(seconds: float) -> None:
    """Keep what takes at least so long to compile, in this process and those that it starts."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(seconds)


keep_compiled_after(0.0)

jax.config.update("jax_platforms", "cpu")
if "JAX_NUM_CPU_DEVICES" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 8)  # enough for a 4 x 2 mesh
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

LONG = {"test_examples.py", "test_readme.py", "test_benchmarks.py", "test_processes.py", "test_run_faults.py"}

# One example may compile several functions, so its time says nothing.
hypothesis.settings.register_profile(
    "project",
    deadline=None,
    max_examples=25,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("project")


@contextlib.contextmanager
def loose_promotion() -> Iterator[None]:
    """Implicit promotion as JAX allows it by default, for the third-party code that relies on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def keeping_nothing_compiled() -> Iterator[None]:
    keep_compiled_after(1e9)
    try:
        yield
    finally:
        keep_compiled_after(0.0)


class JaxSettings:
    """Settings of single items; a plugin, since a conftest's own hooks do not see the packages' doctests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with contextlib.ExitStack() as settings:
            if isinstance(item, pytest.DoctestItem):
                settings.enter_context(jax.enable_x64(False))
                settings.enter_context(loose_promotion())
            elif item.get_closest_marker("loose_promotion"):
                settings.enter_context(loose_promotion())
            if item.get_closest_marker("several_devices"):
                settings.enter_context(keeping_nothing_compiled())
            return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(JaxSettings())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: at the end, one of several workers would run them while the others wait."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture
def key() -> jax.Array:
    """A random key, the same for every test."""
    return jax.random.key(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """A NumPy generator for test data, started anew for every test."""
    return np.random.default_rng(0)
