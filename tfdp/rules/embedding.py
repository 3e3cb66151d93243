"""Embedding layers, which look rows of a matrix up."""

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.clipping import at_least_float32
from tfdp.rules.call import Call
from tfdp.rules.dense import lora_factors
from tfdp.rules.registry import rule
from tfdp.rules.terms import OuterProducts, Term


@rule(keras.layers.Embedding)
def embedding(call: Call) -> Nest:
    """Rule of `keras.layers.Embedding`."""
    layer = call.layer
    ids = row_numbers(call.inputs, layer.input_dim)

    def terms(g: Tensor) -> list[Term]:
        if not layer.lora_enabled:
            return [OuterProducts(layer.embeddings, ids, g)]
        a, b = layer.lora_embeddings_a, layer.lora_embeddings_b
        scaled, low = lora_factors(layer, b, g)
        found = tf.gather(tf.cast(a, g.dtype), ids)
        return [OuterProducts(a, ids, low), OuterProducts(b, found, scaled)]

    return call.watch(call.run_with(), terms, is_linear=not layer.lora_enabled)


@rule("keras.layers.ReversibleEmbedding", "keras_hub.layers.ReversibleEmbedding")
def reversible_embedding(call: Call) -> Nest:
    """Rule of `keras.layers.ReversibleEmbedding`, in both of its directions."""
    layer = call.layer
    if not call.bound()["reverse"]:
        return embedding(call)
    x = call.inputs
    if layer.reverse_dtype is not None:
        x = tf.cast(x, layer.reverse_dtype)
    tied = layer.tie_weights
    adapted = tied and layer.lora_enabled
    kernel = tf.cast(layer.embeddings if tied else layer.reverse_embeddings, x.dtype)

    def terms(g: Tensor) -> list[Term]:
        if adapted:
            return _reverse_lora_terms(layer, x, g)
        if tied:
            return [OuterProducts(layer.embeddings, g, x)]
        return [OuterProducts(layer.reverse_embeddings, x, g)]

    product = tf.matmul(x, kernel, transpose_b=tied)
    logits = call.watch(product, terms, is_linear=not adapted)
    if getattr(layer, "logit_soft_cap", None) is not None:
        return tf.tanh(logits / layer.logit_soft_cap) * layer.logit_soft_cap
    return logits


def _reverse_lora_terms(layer: keras.layers.Layer, x: Tensor, g: Tensor) -> list[Term]:
    """Differentiate products with the rows of ``embeddings + scale a b``, by a and b."""
    a, b = (
        tf.cast(v, g.dtype) for v in (layer.lora_embeddings_a, layer.lora_embeddings_b)
    )
    scaled = g * tf.cast(layer.lora_alpha / layer.lora_rank, g.dtype)
    low = tf.matmul(at_least_float32(x), b, transpose_b=True)
    return [
        OuterProducts(layer.lora_embeddings_a, scaled, low),
        OuterProducts(layer.lora_embeddings_b, tf.matmul(scaled, a), x),
    ]


def row_numbers(ids: Tensor, size: int) -> Tensor:
    """Bring ids to ``[0, size)`` as the lookup does, where negative ones wrap."""
    ids = tf.cast(ids, tf.int32)
    ids = tf.where(ids < 0, ids + size, ids)
    return tf.clip_by_value(ids, 0, size - 1)
