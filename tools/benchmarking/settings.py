"""The flags, and what they choose from."""

from absl import flags
from peers.steps import PROBLEMS

ORDINARY = "ordinary"
TFDP = "tfdp"
ROWS = {
    TFDP: [
        *("vectorized", "fast_gradient_clipping", "ghost", "bookkeeping"),
        *("sat", "bam_sam", "bam_exact", "vectorized_bam_sam"),
    ],
    "opacus": ["hooks", "ghost"],
    "jax_privacy": ["vmap", "one_by_one"],
    "tensorflow_privacy": ["vectorized", "fast_gradient_clipping"],
}
_TFDP_ALONE = (
    *("frozen", "bert", "bert:4", "bert_whole", "gpt2"),
    *("wrn16_4", "mobilenet_v2", "resnet50", "resnext", "convnext_tiny"),
    *("wide_sequence", "long_sequence"),
)
_MODELS = [name for name in PROBLEMS if name not in {"synthetic", "deep", *_TFDP_ALONE}]
_DEPTHS = (2, 8, 32, 128, 200)

MODELS = flags.DEFINE_multi_enum(
    "models",
    _MODELS,
    [*_MODELS, "synthetic", *_TFDP_ALONE],
    "Models; repeat the flag for several. Other frameworks have no "
    f"{', '.join(_TFDP_ALONE)}.",
)
ENGINES = flags.DEFINE_multi_enum(
    "rows", ROWS[TFDP], ROWS[TFDP], "Engines; repeat the flag for several."
)
BATCH_SIZES = flags.DEFINE_multi_integer(
    "batch_size", None, "Examples in a batch; repeat the flag for several.", 1
)
TEXTS = flags.DEFINE_string(
    "texts",
    None,
    "TSV of texts and labels for bert and bert_whole, whose tokens are else made up.",
)
ALONE = flags.DEFINE_string(
    "alone",
    None,
    "File of JSON lines, one for each row that was measured, in a process of its own "
    "for time and memory; the rows that are in it already are not measured again.",
)
POISSON = flags.DEFINE_bool("poisson", False, "Let tfdp's batch sizes vary.")
JIT_COMPILE = flags.DEFINE_bool(
    "jit_compile", False, "Let XLA compile what can do without it."
)
STEPS = flags.DEFINE_integer("steps", 20, "Timed steps of a row.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 5.0, "... but none after this many seconds.")
TIME_LIMIT = flags.DEFINE_float(
    "time_limit", 60.0, "Seconds that a row has to start and to take two steps."
)
MEMORY_LIMIT = flags.DEFINE_float(
    "memory_limit",
    12.0,
    "GiB of the host that a process may keep resident; Linux only.",
)
GROWTH = flags.DEFINE_string(
    "growth", None, "PNG file for a plot over batch sizes and numbers of weights."
)
BAM_PLOT = flags.DEFINE_string("bam_plot", "runs/bam.png", "PNG file for its plot.")
DEPTH = flags.DEFINE_multi_integer(
    "depth", _DEPTHS, "Numbers of its layers; repeat the flag for several.", 1
)
PYTHONS = {
    peer: flags.DEFINE_string(f"{peer}_python", None, f"A Python that has {peer}.")
    for peer in ROWS
    if peer != TFDP
}
