"""A Flower app for real processes: the server writes down all that clients answer."""

import json
import math
from pathlib import Path

import keras
import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from tfdp.federated import flower

LEARNING_RATE, CLIP = 0.5, 0.25


def model():
    return keras.Sequential([
        keras.Input((3,)),
        keras.layers.Dense(2, activation="tanh", kernel_initializer="ones"),
        keras.layers.Dense(1, kernel_initializer="ones"),
    ])


def examples(client):
    rng = np.random.default_rng(client)
    return rng.normal(size=(5, 3)), rng.normal(size=(5, 1))


def private(message, context, call_next):
    budget = flower.LocalBudget(context.node_config["budget"], epsilon=8.0, delta=1e-7)
    # So that the result can be compared.
    budget._noise_multiplier = float(context.node_config["noise"])
    budget._epsilon = math.inf
    mod = flower.local_dp_mod(budget, max_l2_norm_clip=CLIP)
    return mod(message, context, call_next)


client = ClientApp(mods=[private])


@client.train()
def train(message, context):
    x, y = examples(context.node_config["client"])
    reply = flower.gradient_reply(message, model(), "mse", x, y)
    reply.content["secrets"] = MetricRecord({"loss": 0.5, "num-examples": 5})
    return reply


@client.evaluate()
def evaluate(message, context):
    content = RecordDict({"secrets": MetricRecord({"loss": 0.5, "num-examples": 5})})
    return Message(content, reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    clients = context.run_config["clients"]
    strategy = flower.LDPFedSGD(
        model(),
        optimizer=keras.optimizers.SGD(LEARNING_RATE),
        l2_norm_clip=100.0,
        clients_per_round=clients,
    )
    weights = strategy.initial_arrays()
    result = strategy.start(grid, weights, num_rounds=1, timeout=120)
    again = [
        Message(
            RecordDict({
                "arrays": weights,
                "config": ConfigRecord({flower.CLIP_KEY: 1.0}),
            }),
            dst_node_id=node,
            message_type=message_type,
        )
        for node in grid.get_node_ids()
        for message_type in ("train", "evaluate")
    ]
    replies = grid.send_and_receive(again, timeout=120)
    found = {
        "weights": [value.tolist() for value in result.arrays.to_numpy_ndarrays()],
        "again": [{"error": reply.error.reason} for reply in replies],
    }
    Path(context.run_config["found"]).write_text(json.dumps(found))
