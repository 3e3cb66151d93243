"""Flower in one process: a grid whose nodes are `ClientApp`s called directly."""

import copy

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# Flower's processes set it; messages cannot be made without.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def context(node_id):
    return Context(
        run_id=1, node_id=node_id, node_config={}, state=RecordDict(), run_config={}
    )


class LocalGrid(Grid):
    """Nodes by their ids; it keeps all messages and replies."""

    def __init__(self, apps):
        self.apps = apps
        self.contexts = {node_id: context(node_id) for node_id in apps}
        self.messages, self.replies = [], []

    def get_node_ids(self):
        return list(self.apps)

    def get_nodes(self):
        return [NodeInfo(node_id=node_id) for node_id in self.apps]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = [self.answer(message) for message in messages]
        self.messages += messages
        self.replies += replies
        return replies

    def answer(self, message):
        node_id = message.metadata.dst_node_id
        # A client has no part of the server's memory.
        message = copy.deepcopy(message)
        try:
            return self.apps[node_id](message, self.contexts[node_id])
        except Exception as error:  # noqa: BLE001 (so does Flower)
            return Message(Error(code=2, reason=str(error)), reply_to=message)

    def create_message(self, *arguments, **options):
        raise NotImplementedError

    push_messages = pull_messages = set_run = create_message

    @property
    def run(self):
        raise NotImplementedError
