r"""Time and memory of a private training step, beside an ordinary one.

    python tools/benchmark.py
    python tools/benchmark.py --models=cnn --rows=vectorized --steps=50 --jit_compile
    python tools/benchmark.py --startup
    python tools/benchmark.py --fit --models=cnn
    python tools/benchmark.py --reading
    python tools/benchmark.py --noise
    python tools/benchmark.py --growth=growth.png
    python tools/benchmark.py --synthetic
    python tools/benchmark.py --passes
    python tools/benchmark.py --bam
    python tools/benchmark.py --federated
    python tools/benchmark.py --stages --models=synthetic --batch_size=32

Times are medians of whole steps, noise, optimizer and metrics included. The steps of
all rows take turns in one process, so that whatever else the machine does slows all of
them; the ratio of the medians is what counts.

Memory is the peak of what a process of its own keeps resident, for each row, over its
first steps; "steps MiB" leaves out what the process held before them: interpreter,
libraries, weights, batch. On a GPU tfdp's rows show what TensorFlow holds there; those of
other frameworks still show the host's memory, and `--memory_limit` is of the host.
Running out of memory, or of time, is a result. `--stages` shows "steps MiB" for steps
that end early.

Other frameworks train the same models on batches of the same size, in environments of
their own, which the scripts in `tools/peers` describe. Their rows are compared to
their own ordinary step:

    python tools/benchmark.py --opacus_python=PATH --jax_privacy_python=PATH \
        --tensorflow_privacy_python=PATH
"""

import os
import platform
import sys
from collections.abc import Sequence

from absl import app, flags
from benchmarking import settings
from benchmarking.comparing import compare, federated
from benchmarking.depth import over_depth
from benchmarking.growth import growth
from benchmarking.memory import memory_in_passes, memory_of_layers
from benchmarking.processes import FAILED
from benchmarking.ratios import fits, noise, reading
from benchmarking.stages import stages
from benchmarking.startup import startup

flags.adopt_module_key_flags(settings)
_CORES = flags.DEFINE_integer(
    "cores", None, "Cores for every framework; Linux only.", lower_bound=1
)
_STARTUP = flags.DEFINE_bool(
    "startup", False, "CPU seconds from `fit` to the end of the first step, in all."
)
_FIT = flags.DEFINE_bool(
    "fit", False, "Steps of epochs of `fit`, for each way to give it rows."
)
_READING = flags.DEFINE_bool(
    "reading", False, "Passes over bins in files, beside tf.data shuffling of them."
)
_NOISE = flags.DEFINE_bool("noise", False, "What the noise of a million weights takes.")
_SYNTHETIC = flags.DEFINE_bool(
    "synthetic", False, "Memory of dense layers 5120-2560-1280 over batch sizes."
)
_PASSES = flags.DEFINE_bool(
    "passes", False, "Memory of the MLP over batch sizes, in passes of 256 examples."
)
_FEDERATED = flags.DEFINE_bool(
    "federated", False, "Rounds of 1000 virtual clients with 5 examples each."
)
_STAGES = flags.DEFINE_bool(
    "stages", False, "Memory of steps up to the end of each of their stages."
)
_BAM = flags.DEFINE_bool(
    "bam", False, "Time of DP-SGD, DP-SAT and BAM over the depth of a network, XLA."
)


def main(argv: Sequence[str]) -> None:
    """Measure what the flags ask for, and print it."""
    if len(argv) > 1:
        sys.exit(f"benchmark: everything is a flag. Received: {' '.join(argv[1:])}.")
    other = [name for name in settings.MODELS.value if not name.startswith("bert")]
    if settings.TEXTS.value and (other or settings.POISSON.value):
        sys.exit(
            "benchmark: --texts are for bert and bert_whole in batches of one size. Received: "
            f"models={settings.MODELS.value}, poisson={settings.POISSON.value}. "
            "Use --models=bert or --models=bert_whole."
        )
    if _CORES.value is not None:
        # Every process inherits it, and starts as many threads.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _CORES.value])
    print(f"{machine()}\n")
    asked = {
        memory_of_layers: _SYNTHETIC.value,
        memory_in_passes: _PASSES.value,
        federated: _FEDERATED.value,
        startup: _STARTUP.value,
        fits: _FIT.value,
        reading: _READING.value,
        noise: _NOISE.value,
        stages: _STAGES.value,
        over_depth: _BAM.value,
        growth: settings.GROWTH.value is not None,
    }
    results = next((show for show, is_asked in asked.items() if is_asked), compare)()
    if any(each.problem.startswith(FAILED) for each in results):
        sys.exit("benchmark: not all rows could be measured.")


def machine() -> str:
    """Describe the machine, as far as it matters for times."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{platform.system()} {platform.machine()}, {cores} cores{load}, up to "
        f"{settings.MEMORY_LIMIT.value:g} GiB and {settings.TIME_LIMIT.value:g} s a row"
    )


if __name__ == "__main__":
    app.run(main)
