"""States and histories on the disk."""

import csv
import json

import numpy as np
import pytest
import tensorflow as tf

from tfdp.federated.run_folder import (
    State,
    forget_rounds,
    interrupted_rounds,
    note_round,
    read_state,
    write_state,
)

STATE = State(
    settings={"noise": 1.0},
    clips=[0.1, 0.1],
    interrupted=3,
    next_clip=0.3,
    history={"round": [1, 2], "val_loss": [float("inf"), 2.5]},
    nonprivate_norms=np.array([1.0, np.nan]),
    values=[np.arange(6).reshape(2, 3), np.float32(4.0), np.zeros((0, 2))],
)


def test_what_was_written_is_read(tmp_path):
    write_state(tmp_path, STATE)
    state = read_state(tmp_path)
    assert state[:5] == STATE[:5]
    np.testing.assert_array_equal(state.nonprivate_norms, STATE.nonprivate_norms)
    for found, expected in zip(state.values, STATE.values, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    with (tmp_path / "history.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["round", "val_loss"],
            ["1", "inf"],
            ["2", "2.5"],
        ]


def test_half_precision(tmp_path):
    value = tf.constant([1.0, 1e30], tf.bfloat16).numpy()
    write_state(tmp_path, STATE._replace(values=[value]))
    np.testing.assert_array_equal(
        read_state(tmp_path).values[0], value.astype("float32")
    )


def test_an_empty_folder(tmp_path):
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"PK", b"nothing"])
def test_a_damaged_state_is_explained(tmp_path, content):
    (tmp_path / "state.npz").write_bytes(content)
    with pytest.raises(ValueError, match="whose state is damaged"):
        read_state(tmp_path)


def test_a_state_of_something_else_is_explained(tmp_path):
    np.savez(tmp_path / "state.npz", about="{}", nonprivate_norms=np.zeros(1))
    with pytest.raises(ValueError, match="whose state is damaged"):
        read_state(tmp_path)


def test_rounds_that_were_begun_and_not_finished(tmp_path):
    assert not interrupted_rounds(tmp_path, 0)
    for number in (0, 1, 2, 2, 2, 3, 4):
        note_round(tmp_path, number)
    with (tmp_path / "rounds_begun.txt").open("a") as file:
        file.write("5")  # a kill cut it off
    # The state has those that were begun before it was written.
    assert not interrupted_rounds(tmp_path, 5)
    assert interrupted_rounds(tmp_path, 2) == {2: 3, 3: 1, 4: 1}
    assert interrupted_rounds(tmp_path, 3) == {3: 1, 4: 1}
    forget_rounds(tmp_path)
    assert not interrupted_rounds(tmp_path, 0)


def test_states_that_list_interrupted_rounds(tmp_path):
    """As older versions wrote them."""
    about = {key: [] for key in ("settings", "clips", "next_clip", "history")}
    path = tmp_path / "state.npz"
    np.savez(path, about=json.dumps(about | {"interrupted": [3]}), nonprivate_norms=[])
    state = read_state(tmp_path)
    assert (state.values, state.interrupted) == ([], 1)
