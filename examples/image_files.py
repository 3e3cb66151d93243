"""Loads images: MNIST and CIFAR, from a folder or from Keras."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Splits = list[tuple[np.ndarray, np.ndarray]]


def load(
    dataset: str,
    data_dir: str | None,
    numbers: Sequence[int | None] = (None, None),
) -> Splits:
    """Load images to train on and images to test with.

    Args:
        dataset: Name of a module of `keras.datasets`.
        data_dir: A folder with an npz file of that name, of x_train, y_train, x_test
            and y_test, or, with "_jpeg" added to its name, of JPEG files. None for
            what Keras downloads.
        numbers: How many to decode of each at least, the first ones; None for all.

    Returns:
        Images, shape (N, height, width) or (N, height, width, channels), uint8, and
        labels, twice.
    """
    if data_dir is None:
        return list(getattr(keras.datasets, dataset).load_data())
    folder = Path(data_dir)
    path, coded = folder / f"{dataset}.npz", folder / f"{dataset}_jpeg.npz"
    if path.is_file():
        with np.load(path) as arrays:
            return [
                (arrays[f"x_{split}"], arrays[f"y_{split}"])
                for split in ("train", "test")
            ]
    if not coded.is_file():
        sys.exit(
            f"{Path(sys.argv[0]).stem}: there is no {path}. Leave --data_dir out to take "
            "the images of keras.datasets."
        )
    with np.load(coded) as arrays:
        return [
            _decoded(arrays, split, number)
            for split, number in zip(("train", "test"), numbers, strict=True)
        ]


def _decoded(
    arrays: Any, split: str, number: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Decode the first images that are stored as JPEG files, one behind the other."""
    coded, ends = arrays[f"{split}_jpeg"], arrays[f"{split}_offsets"]
    if number is not None:
        ends = ends[: number + 1]
    coded = coded[: ends[-1]].tobytes()
    images = [
        tf.io.decode_jpeg(coded[begin:end]).numpy()
        for begin, end in itertools.pairwise(ends)
    ]
    return np.stack(images), arrays[f"y_{split}"]
