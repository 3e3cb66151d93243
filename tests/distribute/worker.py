"""Runs in a process of its own: trains on the replicas that its strategy has.

    python worker.py OUTPUT JOB ARGUMENT...

The strategy is that of `TF_CONFIG`, with `REPLICAS` logical devices in each process;
without `TF_CONFIG` these are the replicas of a `MirroredStrategy`.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.distribute import cases
from tfdp import _seeds
from tfdp.distribute.replicas import replica_number, summed
from tfdp.mechanisms import mechanism
from tfdp.mechanisms.mechanism import add_noise, seed_of, standard_normal

warnings.simplefilter("ignore")

DEVICES = int(os.environ.get("REPLICAS", "1"))
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * DEVICES,
)
if "TF_CONFIG" in os.environ:
    STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
else:
    STRATEGY = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])


def copies_agree(private):
    """Tell whether every device of this process has the same weights."""
    return all(
        np.array_equal(one.numpy(), copy.numpy())
        for weight in private.model.weights
        for one in [weight.value.values[0]]
        for copy in weight.value.values
    )


def train(*names):
    """Train the cases."""
    found = {}
    for name in names:
        private, history = cases.fit(cases.CASES[name], STRATEGY)
        found[name] = {
            "weights": cases.weights_of(private).tolist(),
            "history": {key: list(map(float, found)) for key, found in history.items()},
            "ledger": private.ledger.to_json(),
            "copies_agree": copies_agree(private),
        }
    return found


def _noised_by_each(share, *, is_alike=False):
    """Noise of each replica, times `share`, added to the sum of all."""

    def noised(clipped_sum, *, noise_multiplier, stream):
        number = tf.cast(replica_number(), tf.int64)
        stream += 0 if is_alike else tf.stack([number * 1000, 0])
        stddev = tf.cast(noise_multiplier, tf.float32) * clipped_sum.l2_norm_clip
        replicas = STRATEGY.num_replicas_in_sync
        return summed([
            gradient / replicas
            + share(replicas)
            * stddev
            * standard_normal(gradient.shape, seed_of(stream, k))
            for k, gradient in enumerate(clipped_sum.gradients)
        ])

    return noised


BUGS = {
    "none": add_noise,
    "each_adds_all": _noised_by_each(lambda replicas: 1.0),
    "each_adds_a_part": _noised_by_each(lambda replicas: 1.0 / replicas),
    "all_add_the_same_share": _noised_by_each(
        lambda replicas: replicas**-0.5, is_alike=True
    ),
}


def noise(*bugs):
    """Return how large the noise of a step is, over what it should be."""
    found = {}
    for bug in bugs:
        mechanism.add_noise = BUGS[bug]
        with STRATEGY.scope():
            model = keras.Sequential([keras.Input((400,)), keras.layers.Dense(300)])
            optimizer = tfdp.optimizers.DPSGD(
                1.0, l2_norm_clip=0.5, noise_multiplier=2.0
            )
        private = tfdp.DPModel(model)
        private.compile(optimizer, "mse")
        x = np.random.default_rng(0).normal(size=(50, 400))
        weights = [cases.weights_of(private)]
        remember = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, private=private, weights=weights: (
                weights.append(cases.weights_of(private))
            )
        )
        private.fit(
            x,
            np.zeros((50, 300)),
            batch_size=5,
            steps_per_epoch=3,
            verbose=0,
            callbacks=[remember],
        )
        updates = np.diff(weights, axis=0)
        found[bug] = {
            "ratio": (updates.std(axis=1) / (2.0 * 0.5 / 5)).tolist(),
            "correlation": float(np.abs(np.corrcoef(updates) - np.eye(3)).max()),
            "weights": weights[-1][:1000].tolist(),
            "copies_agree": copies_agree(private),
        }
    return found


def killed(directory, dies):
    """Train with a backup; this worker may die in the second epoch."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    begun = Path(directory) / f"begun_{index}"

    class Die(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            with begun.open("a") as file:
                file.write("step\n")
            if int(dies) == index and self.epoch == 1 and batch == 2:
                os._exit(9)

    with STRATEGY.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        optimizer = tfdp.optimizers.DPAdam(0.01, l2_norm_clip=0.5, noise_multiplier=0.8)
    private = tfdp.DPModel(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    private.compile(optimizer, loss, metrics=["accuracy"])
    backup = keras.callbacks.BackupAndRestore(str(Path(directory) / f"worker_{index}"))
    x, y = cases.rows()
    try:
        history = private.fit(
            x,
            y,
            batch_size=8,
            epochs=3,
            verbose=0,
            validation_data=(x, y),
            callbacks=[backup, Die()],
        )
    except tfdp.errors.WorkerLostError as error:
        return {"error": str(error)}
    segment = private.ledger.segments[0]
    private.save(Path(directory) / f"model_{index}.keras")
    return {
        "epochs": history.epoch,
        "weights": cases.weights_of(private).tolist(),
        "steps": sum(each.steps for each in private.ledger.segments),
        "probability": segment.expected_batch_size / segment.number_of_examples,
        "epsilon": private.epsilon(1e-3),
        "prediction": private.predict(x, verbose=0).tolist(),
        "val_loss": history.history["val_loss"][-1],
        "evaluated": private.evaluate(x, y, verbose=0, return_dict=True)["loss"],
    }


def others(directory):
    """Train what draws numbers, save and export it; use what is refused."""
    with STRATEGY.scope():
        model = keras.Sequential([
            keras.Input((8,)),
            keras.layers.Dense(8),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ])
        optimizer = tfdp.optimizers.DPAdam(0.01, l2_norm_clip=0.5, noise_multiplier=1.0)
    private = tfdp.DPModel(model, physical_batch_size=2)
    private.compile(optimizer, cases.crossentropy())
    x, y = cases.rows()
    private.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_split=0.2,
        class_weight={0: 1.0, 1: 2.0, 2: 3.0},
        callbacks=[tfdp.callbacks.BiasLogger(every=2)],
    )
    private.save(Path(directory) / "private.keras")
    report = tfdp.export.export_private_model(
        private, Path(directory) / "export" / "1", delta=1e-3
    )
    found = {
        "epsilon": private.epsilon(1e-3),
        "reported": report["epsilon"],
        "prediction": private.predict(x, verbose=0).tolist(),
        "explained": private.explain(),
        "copies_agree": copies_agree(private),
        "errors": [],
    }
    with STRATEGY.scope():
        loaded = keras.models.load_model(Path(directory) / "private.keras")
    loaded.fit(x, y, batch_size=8, verbose=0)
    found["epsilon_after_loading"] = loaded.epsilon(1e-3)

    def meeting():
        with STRATEGY.scope():

            class Centre(keras.layers.Layer):
                def call(self, x):
                    return x - tf.reduce_mean(x, 0)

            model = keras.Sequential([
                keras.Input((8,)),
                keras.layers.Dense(8),
                Centre(),
            ])
            optimizer = tfdp.optimizers.DPAdam(l2_norm_clip=1, noise_multiplier=1)
        private = tfdp.DPModel(model, engine="bookkeeping")
        private.compile(optimizer, "mse")
        private.fit(x, x, verbose=0)

    def loop_of_ones_own():
        clipped_sum = tfdp.clipped_gradients(
            model, cases.crossentropy(), x, y, l2_norm_clip=1.0
        )
        STRATEGY.run(
            lambda: private.optimizer.apply_clipped_sum(
                clipped_sum, model.trainable_variables
            )
        )

    for refused in (
        lambda: private.train_on_batch(x, y),
        lambda: private.train_step((x, y)),
        lambda: private.fit((each for each in [(x, y)]), verbose=0),
        meeting,
        loop_of_ones_own,
    ):
        try:
            refused()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
            found["errors"].append(f"{type(error).__name__}: {error}")
    return found


def masks():
    """Return what each replica draws from the seeds that all of them have."""
    model = keras.Sequential([keras.layers.Dropout(0.5, seed=1)])
    # The key is nothing: what differs is the replica.
    _seeds.renew_key(model, is_known=True)

    def draw():
        with _seeds.secret_seeds(model):
            return model(tf.ones([64]), training=True)

    with STRATEGY.scope():
        model(tf.ones([64]))
        drawn = tf.function(lambda: STRATEGY.run(draw))()
    return {"masks": [each.numpy().tolist() for each in drawn.values]}


class SetClip(keras.callbacks.Callback):
    """Sets another clip norm after two steps."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.optimizer.l2_norm_clip = 1e-6


def data_of_another_worker(what, index, folder):
    """Return arguments of `fit` that differ between the workers as asked for."""
    x, y = cases.rows()
    order = np.random.default_rng(index).permutation(40)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=index)
    declared = tfdp.data.declare(
        shuffled.batch(8),
        number_of_examples=40,
        expected_batch_size=8,
        sampling="shuffle",
    )
    arrays = {"x": x, "y": y, "batch_size": 8}
    examples = 40 - 10 * index
    return {
        "order": {"x": declared},
        "examples": arrays | {"x": x[:examples], "y": y[:examples]},
        "rows": arrays | {"x": x[order], "y": y[order]},
        "epochs": arrays | {"epochs": 2 + index},
        "directory": arrays | {"callbacks": [keras.callbacks.BackupAndRestore(folder)]},
        "clip": arrays | {"callbacks": [SetClip()] * index},
    }.get(what, arrays)


def different(folder, *whats):
    """Return the errors where the workers do not do the same."""
    return {what: refusal(folder, what) for what in whats}


def refusal(folder, what):
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with STRATEGY.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        optimizer = tfdp.optimizers.DPAdam(0.01, l2_norm_clip=0.5, noise_multiplier=0.8)
    private = tfdp.DPModel(model)
    private.compile(optimizer, cases.crossentropy())
    if what == "weights" and index:
        model.set_weights([weight + 1.0 for weight in model.get_weights()])
    if what == "no_epoch" and index:
        # As after a kill when the last epoch was over.
        private._initial_epoch = 1
    before = cases.weights_of(private)
    try:
        private.fit(**data_of_another_worker(what, index, folder), verbose=0)
    except (
        ValueError,
        tfdp.errors.NotPrivateError,
        tfdp.errors.WorkerLostError,
    ) as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "moved": float(np.abs(cases.weights_of(private) - before).max()),
        }
    return {}


def wait_for_others(output):
    """Stay a while: who is gone cannot hand over what others still wait for."""
    workers = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
    number = len(workers.get("worker", []))
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if len(list(output.parent.glob("worker_*.json"))) >= number:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    output, job, *arguments = sys.argv[1:]
    Path(output).write_text(json.dumps(globals()[job](*arguments)))
    wait_for_others(Path(output))
