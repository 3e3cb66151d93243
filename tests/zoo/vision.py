"""Images, videos, point clouds."""

import keras
from keras import layers, ops

import tfdp
from tests.zoo.entry import CLASSES, YES_OR_NO, Entry, images

DIM = 8


def block(x, chance, heads=2):
    """Attention and a perceptron, each beside a shortcut."""
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, DIM // heads, dropout=0.1 * chance)(y, y)
    x = layers.Add()([x, y])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(2 * DIM, "gelu")(y)
    y = layers.Dropout(0.1 * chance)(y)
    return layers.Add()([x, layers.Dense(DIM)(y)])


class ClassToken(layers.Layer):
    """Puts a word that means the whole image before its patches."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")

    def call(self, x):
        shape = (ops.shape(x)[0], 1, x.shape[-1])
        return ops.concatenate([ops.broadcast_to(self.token, shape), x], axis=1)


class LearnedPositions(layers.Layer):
    """Adds a weight with a leading axis of 1."""

    def build(self, shape):
        self.positions = self.add_weight(shape=(1, *shape[1:]), name="positions")

    def call(self, x):
        return x + self.positions


class PatchEncoder(layers.Layer):
    """Projects patches and adds an embedding of their numbers."""

    def __init__(self, patches, **kwargs):
        super().__init__(**kwargs)
        self.patches = patches
        self.projection = layers.Dense(DIM)
        self.position_embedding = layers.Embedding(patches, DIM)

    def call(self, x):
        positions = ops.expand_dims(ops.arange(0, self.patches), axis=0)
        return self.projection(x) + self.position_embedding(positions)


class Patches(layers.Layer):
    """Cuts images into patches."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def call(self, x):
        patches = ops.image.extract_patches(x, self.size)
        return ops.reshape(
            patches, (-1, patches.shape[1] * patches.shape[2], patches.shape[3])
        )


class Captions(keras.Model):
    """Says words of an image, and computes its loss of their probabilities itself."""

    def __init__(self):
        super().__init__()
        self.seen = keras.Sequential([
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(DIM),
        ])
        self.words = layers.Embedding(9, DIM)
        self.said = layers.GRU(DIM, return_sequences=True)
        self.next = layers.Dense(9, activation="softmax")

    def call(self, inputs):
        image, words = inputs
        first = self.seen(image)
        return self.next(self.said(self.words(words), initial_state=first))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred)
        known = ops.cast(ops.not_equal(y, 0), losses.dtype)
        return ops.mean(ops.sum(losses * known, 1) / ops.sum(known, 1))


def captions(_):
    return Captions()


def images_with_words(rng, rows):
    words = rng.integers(1, 9, (rows, 6))
    return (4 * rng.normal(size=(rows, 8, 8, 1)), words[:, :-1]), words[:, 1:]


def vit_class_token(chance):
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(DIM, 4, strides=4)(inputs)
    x = layers.Reshape((4, DIM))(x)
    x = LearnedPositions()(ClassToken()(x))
    x = block(x, chance)
    return keras.Model(inputs, layers.Dense(3)(x[:, 0]))


def vit_patch_encoder(chance):
    inputs = keras.Input((8, 8, 3))
    x = PatchEncoder(4)(Patches(4)(inputs))
    x = layers.Flatten()(block(x, chance))
    return keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.3 * chance)(x)))


def mlp_mixer(chance):
    inputs = keras.Input((8, 8, 3))
    x = layers.Dense(DIM)(Patches(4)(inputs))
    for _ in range(2):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Dense(4)(layers.Dense(6, "gelu")(y))
        x = x + layers.Permute((2, 1))(y)
        y = layers.Dense(DIM)(layers.Dense(6, "gelu")(layers.LayerNormalization()(x)))
        x = x + layers.Dropout(0.1 * chance)(y)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def conv_mixer(_):
    def normalized(x):
        return layers.BatchNormalization()(layers.Activation("gelu")(x))

    inputs = keras.Input((8, 8, 3))
    x = normalized(layers.Conv2D(DIM, 2, strides=2)(layers.Rescaling(0.5)(inputs)))
    y = normalized(layers.DepthwiseConv2D(3, padding="same")(x))
    x = normalized(layers.Conv2D(DIM, 1)(layers.Add()([x, y])))
    outputs = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
    return tfdp.fix_model(keras.Model(inputs, outputs))


class StochasticDepth(layers.Layer):
    """Leaves a branch out, in some rows."""

    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=None):
        if not training:
            return x
        keep = 1 - self.rate
        shape = (ops.shape(x)[0], 1, 1)
        draw = keras.random.uniform(shape, 0, 1, seed=self.seed_generator)
        return x / keep * ops.floor(keep + ops.cast(draw, x.dtype))


class SequencePooling(layers.Layer):
    """Averages words, weighted by what one attention says."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.Dense(1)

    def call(self, x):
        weights = ops.transpose(ops.softmax(self.attention(x), axis=1), (0, 2, 1))
        return ops.squeeze(ops.matmul(weights, x), -2)


def cct(chance):
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(DIM, 3, padding="same", use_bias=False, activation="relu")(inputs)
    x = layers.MaxPooling2D(3, 2, "same")(layers.ZeroPadding2D(1)(x))
    x = layers.Reshape((25, DIM))(x)
    x = LearnedPositions()(x)
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(2, 4)(y, y)
    x = x + StochasticDepth(0.2 * chance)(y)
    x = SequencePooling()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(3)(x))


class WindowAttention(layers.Layer):
    """Attention within windows, with a learned bias of relative positions."""

    def __init__(self, size, window, shift, **kwargs):
        super().__init__(**kwargs)
        self.size, self.window, self.shift = size, window, shift
        self.qkv = layers.Dense(3 * DIM)
        self.projection = layers.Dense(DIM)

    def build(self, shape):
        span = 2 * self.window - 1
        self.table = self.add_weight(shape=(span * span, 2), name="bias_table")
        at = ops.stack(
            ops.meshgrid(ops.arange(self.window), ops.arange(self.window)), -1
        )
        at = ops.reshape(at, (-1, 2))
        apart = at[:, None] - at[None] + self.window - 1
        self.index = apart[..., 0] * span + apart[..., 1]
        self.built = True

    def call(self, x):
        size, window = self.size, self.window
        count, area = size // window, window * window
        x = ops.reshape(x, (-1, size, size, DIM))
        x = ops.roll(x, (-self.shift, -self.shift), (1, 2))
        x = ops.reshape(x, (-1, count, window, count, window, DIM))
        x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, area, DIM))
        qkv = ops.reshape(self.qkv(x), (-1, area, 3, 2, DIM // 2))
        q, k, v = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), 3)
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2)))
        bias = ops.take(self.table, ops.reshape(self.index, (-1,)), axis=0)
        bias = ops.transpose(ops.reshape(bias, (area, area, 2)), (2, 0, 1))
        x = ops.matmul(ops.softmax(scores + ops.expand_dims(bias, 0), -1), v)
        x = ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, area, DIM))
        x = self.projection(x)
        x = ops.reshape(x, (-1, count, count, window, window, DIM))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        x = ops.reshape(x, (-1, size, size, DIM))
        x = ops.roll(x, (self.shift, self.shift), (1, 2))
        return ops.reshape(x, (-1, size * size, DIM))


class PatchMerging(layers.Layer):
    """Makes one patch of four."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.linear = layers.Dense(2 * DIM, use_bias=False)

    def call(self, x):
        x = ops.reshape(x, (-1, self.size, self.size, DIM))
        parts = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        x = ops.concatenate(parts, axis=-1)
        return self.linear(ops.reshape(x, (-1, (self.size // 2) ** 2, 4 * DIM)))


def swin(_):
    inputs = keras.Input((8, 8, 3))
    x = PatchEncoder(16)(Patches(2)(inputs))
    for shift in (0, 1):
        x = x + WindowAttention(4, 2, shift)(layers.LayerNormalization()(x))
    x = layers.GlobalAveragePooling1D()(PatchMerging(4)(x))
    return keras.Model(inputs, layers.Dense(3)(x))


class Blocks(layers.Layer):
    """Cuts an image into square blocks of pixels, or joins them again."""

    def __init__(self, size, *, joins=False, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.joins = joins

    def call(self, x):
        if self.joins:
            grid, width = int(x.shape[1] ** 0.5), x.shape[-1]
            x = ops.reshape(x, (-1, grid, grid, self.size, self.size, width))
            x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
            return ops.reshape(x, (-1, grid * self.size, grid * self.size, width))
        grid, width = x.shape[1] // self.size, x.shape[-1]
        x = ops.reshape(x, (-1, grid, self.size, grid, self.size, width))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, grid**2, self.size**2, width))


def nested_transformer(chance):
    """Attention inside of blocks, which a convolution joins."""

    def level(x):
        x = Blocks(2)(x)
        y = layers.LayerNormalization()(x)
        attend = layers.MultiHeadAttention(
            2, DIM // 2, attention_axes=(2,), dropout=0.1 * chance
        )
        x = layers.Add()([x, attend(y, y)])
        y = layers.Dense(2 * DIM, "gelu")(layers.LayerNormalization()(x))
        return Blocks(2, joins=True)(layers.Add()([x, layers.Dense(DIM)(y)]))

    inputs = keras.Input((8, 8, 3))
    x = level(layers.Conv2D(DIM, 2, strides=2)(inputs))
    x = layers.LayerNormalization()(layers.Conv2D(DIM, 3, padding="same")(x))
    x = level(layers.MaxPooling2D(3, strides=2, padding="same")(x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def unet(_):
    def convolved(x, filters):
        x = layers.SeparableConv2D(filters, 3, padding="same")(x)
        return layers.Activation("relu")(layers.BatchNormalization()(x))

    inputs = keras.Input((8, 8, 3))
    first = convolved(inputs, 4)
    x = convolved(layers.MaxPooling2D(2)(first), 8)
    x = layers.Conv2DTranspose(4, 3, padding="same")(x)
    x = layers.UpSampling2D(2)(x)
    x = convolved(layers.Concatenate()([first, x]), 4)
    return tfdp.fix_model(keras.Model(inputs, layers.Conv2D(3, 1)(x)))


def segments(rng, rows):
    """Draw a class for each pixel."""
    return rng.normal(size=(rows, 8, 8, 3)), rng.integers(3, size=(rows, 8, 8))


def pairs(rng, rows):
    """Draw pairs of images, alike or not."""
    x = [rng.normal(size=(rows, 8, 8, 1)) for _ in range(2)]
    return x, rng.integers(2, size=(rows, 1))


def siamese(_):
    image = keras.Input((8, 8, 1))
    x = layers.AveragePooling2D(2)(layers.Conv2D(4, 3, activation="tanh")(image))
    embedding = keras.Model(image, layers.Dense(6)(layers.Flatten()(x)))

    def distance(pair):
        square = ops.sum(ops.square(pair[0] - pair[1]), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(square, keras.config.epsilon()))

    inputs = [keras.Input((8, 8, 1)) for _ in range(2)]
    x = layers.Lambda(distance)([embedding(each) for each in inputs])
    return keras.Model(inputs, layers.Dense(1)(x))


def cnn_3d(chance):
    inputs = keras.Input((6, 6, 4, 1))
    x = layers.Conv3D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.GroupNormalization(2)(layers.MaxPool3D(2)(x))
    x = layers.Conv3D(4, 2, activation="relu")(x)
    x = layers.Dropout(0.3 * chance)(layers.GlobalAveragePooling3D()(x))
    return keras.Model(inputs, layers.Dense(1)(x))


def pointnet(chance):
    def convolved(x, filters):
        x = layers.BatchNormalization()(layers.Conv1D(filters, 1)(x))
        return layers.Activation("relu")(x)

    def transformed(inputs, features):
        x = layers.GlobalMaxPooling1D()(convolved(inputs, 6))
        bias = keras.initializers.Constant(keras.ops.eye(features).numpy().ravel())
        x = layers.Dense(
            features**2, kernel_initializer="zeros", bias_initializer=bias
        )(x)
        return layers.Dot(axes=(2, 1))([
            inputs,
            layers.Reshape((features, features))(x),
        ])

    inputs = keras.Input((10, 3))
    x = convolved(transformed(inputs, 3), 4)
    x = layers.GlobalMaxPooling1D()(convolved(transformed(x, 4), 8))
    x = layers.Dropout(0.3 * chance)(x)
    return tfdp.fix_model(keras.Model(inputs, layers.Dense(3)(x)))


class Neighbours(layers.Layer):
    """Attends to the points that are next to each, looked up among those of all rows."""

    def __init__(self, number, **kwargs):
        super().__init__(**kwargs)
        self.number = number
        self.query, self.key, self.value = (layers.Dense(DIM) for _ in range(3))
        self.position = layers.Dense(DIM, "tanh")
        self.weigh = layers.Dense(DIM)

    def call(self, places, x):
        rows, points = ops.shape(places)[0], places.shape[1]
        apart = ops.sum(ops.square(places[:, :, None] - places[:, None]), axis=-1)
        near = ops.cast(ops.top_k(-apart, self.number)[1], "int32")
        near += ops.arange(rows, dtype="int32")[:, None, None] * points

        def gathered(of_points):
            flat = ops.reshape(of_points, (-1, of_points.shape[-1]))
            return ops.take(flat, near, axis=0)

        position = self.position(places[:, :, None] - gathered(places))
        weights = self.query(x)[:, :, None] - gathered(self.key(x)) + position
        weights = ops.softmax(self.weigh(weights), axis=2)
        return ops.sum(weights * (gathered(self.value(x)) + position), axis=2)


def point_transformer(_):
    inputs = keras.Input((7, 3))
    x = layers.Dense(DIM)(inputs)
    x = layers.Add()([x, Neighbours(3)(inputs, x)])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling1D()(x)))


def autoencoder(_):
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(x)
    return keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))


def conv_lstm(_):
    inputs = keras.Input((3, 6, 6, 1))
    x = layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True)(inputs)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Conv3D(1, 3, padding="same")(x))


def video(_):
    inputs = keras.Input((3, 6, 6, 1))
    image = keras.Sequential([
        layers.Conv2D(4, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
    ])
    x = layers.GRU(4)(layers.TimeDistributed(image)(inputs))
    return keras.Model(inputs, layers.Dense(3)(x))


def squeeze_and_excitation(_):
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(DIM, 3, padding="same")(inputs)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Dense(DIM, "sigmoid")(layers.Dense(2, "relu")(gate))
    x = layers.Multiply()([x, gate])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling2D()(x)))


def super_resolution(_):
    inputs = keras.Input((4, 4, 1))
    x = layers.Conv2D(8, 3, padding="same", activation="tanh")(inputs)
    x = layers.Conv2D(4, 3, padding="same")(x)
    x = ops.reshape(x, (-1, 4, 4, 2, 2))
    x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4)), (-1, 8, 8, 1))
    return keras.Model(inputs, x)


def resolutions(rng, rows):
    """Draw coarse and fine images."""
    return rng.normal(size=(rows, 4, 4, 1)), rng.normal(size=(rows, 8, 8, 1))


class Latents(layers.Layer):
    """Attends from vectors that are no data."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.Attention(use_scale=True, dropout=0.0)
        self.dense = layers.Dense(DIM)

    def build(self, shape):
        self.latents = self.add_weight(shape=(3, DIM), name="latents")
        self.dense.build((None, 3, DIM))

    def call(self, x):
        latents = ops.expand_dims(self.latents, 0)
        latents = ops.repeat(latents, ops.shape(x)[0], axis=0)
        return self.dense(self.attention([latents, x]))


def perceiver(_):
    inputs = keras.Input((8, 8, 3))
    x = Latents()(PatchEncoder(4)(Patches(4)(inputs)))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def spatial_gating(chance):
    inputs = keras.Input((8, 8, 3))
    x = layers.Dense(2 * DIM, "gelu")(Patches(4)(inputs))
    u, v = ops.split(layers.Dropout(0.1 * chance)(x), 2, axis=2)
    v = layers.Dense(4, bias_initializer="ones")(
        ops.transpose(layers.LayerNormalization()(v), (0, 2, 1))
    )
    x = layers.Dense(DIM)(u * ops.transpose(v, (0, 2, 1)))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def bag_of_instances(_):
    """Attention over the instances of a bag, each given by itself."""
    inputs = [keras.Input((6,)) for _ in range(3)]
    shared = layers.Dense(5, "relu")
    embeddings = [shared(each) for each in inputs]
    score = layers.Dense(1, use_bias=False)
    tanh, gate = layers.Dense(4, "tanh"), layers.Dense(4, "sigmoid")
    scores = ops.stack([score(tanh(e) * gate(e)) for e in embeddings], 0)
    weights = ops.softmax(scores, axis=0)
    x = layers.concatenate([e * weights[n] for n, e in enumerate(embeddings)])
    return keras.Model(inputs, layers.Dense(2)(x))


def bags(rng, rows):
    """Draw bags."""
    return [rng.normal(size=(rows, 6)) for _ in range(3)], rng.integers(2, size=rows)


class Reader(keras.Model):
    """Compares whole words, which are found in what it says of each place."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return keras.losses.CTC()(y, y_pred)


def handwriting(chance):
    inputs = keras.Input((12, 6, 1))
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    x = layers.Reshape((6, 12))(layers.MaxPooling2D(2)(x))
    x = layers.Dropout(0.2 * chance)(layers.Dense(6, "relu")(x))
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    return Reader(inputs, layers.Dense(5)(x))


def writings(rng, rows):
    """Draw images of words of two letters."""
    return rng.normal(size=(rows, 12, 6, 1)), rng.integers(1, 5, size=(rows, 2))


IMAGES = images(8, 8, 3)

ENTRIES = [
    Entry("captions", captions, images_with_words, None, "bookkeeping"),
    Entry("vit_class_token", vit_class_token, IMAGES, CLASSES, "bookkeeping", True),
    Entry("vit_patch_encoder", vit_patch_encoder, IMAGES, CLASSES, "bookkeeping"),
    Entry("mlp_mixer", mlp_mixer, IMAGES, CLASSES, "bookkeeping"),
    Entry("conv_mixer", conv_mixer, IMAGES, CLASSES, "bookkeeping"),
    Entry("cct", cct, IMAGES, CLASSES, "bookkeeping"),
    Entry("swin", swin, IMAGES, CLASSES, "bookkeeping"),
    Entry("nested_transformer", nested_transformer, IMAGES, CLASSES, "bookkeeping"),
    Entry("unet", unet, segments, CLASSES, "bookkeeping"),
    Entry("siamese", siamese, pairs, YES_OR_NO, "bookkeeping"),
    Entry(
        "cnn_3d",
        cnn_3d,
        images(6, 6, 4, 1, classes=2),
        YES_OR_NO,
        "bookkeeping",
        dtype="float32",
    ),
    Entry("pointnet", pointnet, images(10, 3), CLASSES, "bookkeeping"),
    Entry("point_transformer", point_transformer, images(7, 3), CLASSES, "bookkeeping"),
    Entry(
        "autoencoder", autoencoder, images(8, 8, 1, classes=None), "mse", "bookkeeping"
    ),
    Entry(
        "conv_lstm", conv_lstm, images(3, 6, 6, 1, classes=None), "mse", "bookkeeping"
    ),
    Entry("video", video, images(3, 6, 6, 1), CLASSES, "bookkeeping"),
    Entry(
        "squeeze_and_excitation", squeeze_and_excitation, IMAGES, CLASSES, "bookkeeping"
    ),
    Entry("super_resolution", super_resolution, resolutions, "mae", "bookkeeping"),
    Entry("perceiver", perceiver, IMAGES, CLASSES, "bookkeeping"),
    Entry("spatial_gating", spatial_gating, IMAGES, CLASSES, "bookkeeping"),
    Entry("bag_of_instances", bag_of_instances, bags, CLASSES, "bookkeeping"),
    Entry("handwriting", handwriting, writings, None, "bookkeeping", dtype="float32"),
]
