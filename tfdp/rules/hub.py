"""Layers of KerasHub with variables of their own, without which tfdp runs as well.

Its other layers are made of Keras's, which have rules.
"""

import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.embedding import row_numbers
from tfdp.rules.preactivations import watch_preactivation
from tfdp.rules.registry import own_variables, rule
from tfdp.rules.terms import OuterProducts, PerRow, Term


@rule("keras_hub.layers.PositionEmbedding")
def position_embedding(call: Call) -> Nest:
    """Rule of `keras_hub.layers.PositionEmbedding`, a lookup of each row's positions."""
    layer, arguments = call.layer, call.bound()
    shape = tf.shape(call.inputs)[:-1]
    # An argument of later releases.
    positions = arguments.get("positions")
    if positions is None:
        positions = tf.range(shape[-1]) + tf.cast(arguments["start_index"], tf.int32)
    ids = tf.broadcast_to(row_numbers(positions, layer.sequence_length), shape)

    def terms(g: Tensor) -> list[Term]:
        return [OuterProducts(layer.position_embeddings, ids, g)]

    return call.watch(call.run_with(), terms, is_linear=True)


@rule("keras_hub.layers.MaskedLMHead")
def masked_lm_head(call: Call) -> Nest:
    """Rule of `keras_hub.layers.MaskedLMHead`, which has a bias and borrows its matrix.

    Args:
        call: The call.

    Returns:
        The layer's outputs.

    Raises:
        UnsupportedLayerError: If it multiplies by a matrix of its own.
    """
    if call.layer.token_embedding is None:
        raise UnsupportedLayerError(
            "A MaskedLMHead must multiply by the token embedding. Received: "
            f"`{call.path}` with token_embedding=None. Use "
            "`MaskedLMHead(token_embedding=backbone.token_embedding)`."
        )
    biases = own_variables(call.layer)
    return watch_preactivation(call, lambda g: [PerRow(bias, g) for bias in biases])
