"""Models with losses of their own, and those that draw whenever they are called."""

import keras
import numpy as np
from keras import layers, ops

from tests.zoo.entry import Entry, images, numbers


class Sampling(layers.Layer):
    """Draws from the distribution that an encoder says."""

    def __init__(self, chance, **kwargs):
        super().__init__(**kwargs)
        self.chance = chance
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        mean, log_variance = inputs
        drawn = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        drawn = ops.cast(self.chance * drawn, mean.dtype)
        return mean + ops.exp(0.5 * log_variance) * drawn


class VAE(keras.Model):
    """Its loss is one of its input and of what the encoder says."""

    def __init__(self, chance):
        super().__init__()
        inputs = keras.Input((8, 8, 1))
        x = layers.Conv2D(3, 3, 2, padding="same", activation="relu")(inputs)
        x = layers.Dense(6, "relu")(layers.Flatten()(x))
        mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
        drawn = Sampling(chance)([mean, log_variance])
        self.encoder = keras.Model(inputs, [mean, log_variance, drawn])
        self.decoder = keras.Sequential([
            keras.Input((2,)),
            layers.Dense(4 * 4 * 2, "relu"),
            layers.Reshape((4, 4, 2)),
            layers.Conv2DTranspose(1, 3, 2, padding="same"),
        ])

    def call(self, x):
        mean, log_variance, drawn = self.encoder(x)
        return {
            "mean": mean,
            "log_variance": log_variance,
            "image": self.decoder(drawn),
        }

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        away = ops.square(ops.cast(x, y_pred["image"].dtype) - y_pred["image"])
        mean, log_variance = y_pred["mean"], y_pred["log_variance"]
        apart = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        return ops.mean(ops.sum(away, (1, 2, 3)) + ops.sum(apart, 1))


class SamplingWithLoss(Sampling):
    """Adds how far the distribution is from a normal one."""

    def call(self, inputs):
        mean, log_variance = inputs
        apart = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        self.add_loss(-0.5 * ops.mean(ops.sum(apart, axis=1)))
        return super().call(inputs)


class Diffusion(keras.Model):
    """Finds the noise in what it has made noisy, of as much as it draws."""

    def __init__(self, chance):
        super().__init__()
        self.chance = chance
        self.seed_generator = keras.random.SeedGenerator(1)
        self.convolved = layers.Conv2D(3, 3, padding="same", activation="swish")
        self.amount = layers.Dense(3)
        self.output_layer = layers.Conv2D(1, 3, padding="same")

    def call(self, images):
        rows = ops.shape(images)[0]
        draw = keras.random.uniform((rows, 1, 1, 1), seed=self.seed_generator)
        angle = 0.2 + self.chance * ops.cast(draw, images.dtype)
        noise = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        noise = 0.5 + self.chance * ops.cast(noise, images.dtype)
        noisy = ops.cos(angle) * images + ops.sin(angle) * noise
        waves = angle * ops.cast(np.array([1.0, 2.0, 4.0]), images.dtype)
        waves = ops.concatenate([ops.sin(waves), ops.cos(waves)], axis=-1)
        x = self.convolved(noisy) + self.amount(waves)
        return self.output_layer(x) - noise

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return ops.mean(ops.abs(y_pred))


class VectorQuantizer(layers.Layer):
    """Takes the nearest of a few vectors; gradients go straight through."""

    def build(self, shape):
        self.codes = self.add_weight(
            shape=(shape[-1], 5), initializer="random_normal", name="codes"
        )

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        away = (
            ops.sum(flat**2, 1, keepdims=True)
            + ops.sum(self.codes**2, 0)
            - 2 * ops.matmul(flat, self.codes)
        )
        nearest = ops.one_hot(ops.argmin(away, 1), 5, dtype=x.dtype)
        found = ops.matmul(nearest, ops.transpose(self.codes))
        return ops.reshape(found, ops.shape(x))


class VQVAE(keras.Model):
    """An autoencoder between whose halves only the numbers of vectors pass."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Conv2D(3, 3, 2, padding="same")
        self.quantizer = VectorQuantizer()
        self.decoder = layers.Conv2DTranspose(1, 3, 2, padding="same")

    def call(self, x):
        encoded = self.encoder(x)
        found = self.quantizer(encoded)
        through = encoded + ops.stop_gradient(found - encoded)
        return {"image": self.decoder(through), "encoded": encoded, "found": found}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        encoded, found = y_pred["encoded"], y_pred["found"]
        return (
            ops.mean(ops.square(ops.cast(x, encoded.dtype) - y_pred["image"]))
            + ops.mean(ops.square(ops.stop_gradient(found) - encoded)) / 4
            + ops.mean(ops.square(found - ops.stop_gradient(encoded)))
        )


class VectorQuantizerWithLoss(VectorQuantizer):
    """Adds how far vectors are from what is found for them."""

    def call(self, x):
        found = super().call(x)
        self.add_loss(
            ops.mean(ops.square(ops.stop_gradient(found) - x)) / 4
            + ops.mean(ops.square(found - ops.stop_gradient(x)))
        )
        return x + ops.stop_gradient(found - x)


class Flow(keras.Model):
    """Invertible layers, whose loss is how unlikely what comes in is."""

    def __init__(self):
        super().__init__()
        self.nets = [
            keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(4, "tanh")])
            for _ in range(2)
        ]

    def call(self, x):
        volume = 0
        for n, net in enumerate(self.nets):
            mask = ops.cast(np.array([n % 2, 1 - n % 2]), x.dtype)
            scale, shift = ops.split(net(x * mask), 2, axis=-1)
            scale, shift = scale * (1 - mask), shift * (1 - mask)
            x = x * ops.exp(scale) + shift
            volume += ops.sum(scale, -1)
        return x, volume

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        code, volume = y_pred
        return ops.mean(0.5 * ops.sum(ops.square(code), -1) - volume)


def vae(chance):
    return VAE(chance)


def vae_of_layers(chance):
    """No class of its own: a layer in the middle adds a loss."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(6, "relu")(layers.Flatten()(inputs))
    code = SamplingWithLoss(chance)([layers.Dense(2)(x), layers.Dense(2)(x)])
    outputs = layers.Dense(64)(layers.Dense(6, "relu")(code))
    return keras.Model(inputs, layers.Reshape((8, 8, 1))(outputs))


def sparse_autoencoder(_):
    """Few units are to be active."""
    inputs = keras.Input((8, 8, 1))
    code = layers.Dense(12, "relu", activity_regularizer=keras.regularizers.L1(0.1))
    outputs = layers.Dense(64)(code(layers.Flatten()(inputs)))
    return keras.Model(inputs, layers.Reshape((8, 8, 1))(outputs))


def diffusion(chance):
    return Diffusion(chance)


def vq_vae(_):
    return VQVAE()


def vq_vae_of_layers(_):
    """No class of its own: the layer in the middle trains its vectors by what it adds."""
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(3, 3, 2, padding="same"),
        VectorQuantizerWithLoss(),
        layers.Conv2DTranspose(1, 3, 2, padding="same"),
    ])


def flow(_):
    return Flow()


def monte_carlo_dropout(chance):
    """Drops in training and afterwards, to tell how sure it is."""
    inputs = keras.Input((6,))
    x = layers.Dense(8, "relu")(inputs)
    x = layers.Dropout(0.3 * chance)(x, training=True)
    x = layers.Dense(8, "relu")(x)
    x = layers.Dropout(0.3 * chance)(x, training=True)
    return keras.Model(inputs, layers.Dense(1)(x))


class PixelConvolution(layers.Layer):
    """Sees no more than the pixels before: others are taken out of its kernel."""

    def __init__(self, sees_itself, **options):
        super().__init__()
        self.sees_itself = sees_itself
        self.conv = layers.Conv2D(padding="same", **options)

    def build(self, shape):
        self.conv.build(shape)
        mask = np.zeros(self.conv.kernel.shape, "float32")
        middle = len(mask) // 2
        mask[:middle] = mask[middle, : middle + self.sees_itself] = 1
        self.mask = mask

    def call(self, x):
        kernel = self.conv.kernel
        kernel.assign(kernel * ops.cast(self.mask, kernel.dtype))
        return self.conv(x)


def pixel_cnn(_):
    inputs = keras.Input((8, 8, 1))
    x = PixelConvolution(False, filters=4, kernel_size=3, activation="relu")(inputs)
    x = PixelConvolution(True, filters=4, kernel_size=3, activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(1, 1)(x))


class ScaledConvolution(layers.Layer):
    """Keeps a kernel whose columns have length one, and how long they are to be."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, shape[-1], 4), name="kernel")
        self.length = self.add_weight(shape=(4,), initializer="ones", name="length")

    def call(self, x):
        squares = ops.sum(self.kernel**2, axis=(0, 1), keepdims=True)
        kernel = self.kernel * self.length / ops.sqrt(squares + 1e-6)
        return ops.conv(x, kernel, padding="same")


def vocoder(_):
    inputs = keras.Input((8, 3))
    x = layers.LeakyReLU()(ScaledConvolution()(inputs))
    x = layers.Conv1DTranspose(4, 4, 2, padding="same")(x)
    x = layers.LeakyReLU()(ScaledConvolution()(x))
    return keras.Model(inputs, layers.Conv1D(1, 3, padding="same")(x))


class Rendered(layers.Layer):
    """Adds up what a network says of points along each ray."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.network = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])

    def call(self, starts, directions):
        along = ops.cast(ops.linspace(0.0, 1.0, 5), starts.dtype)
        points = starts[..., None, :] + directions[..., None, :] * along[:, None]
        points = ops.concatenate([points, ops.sin(points), ops.cos(points)], axis=-1)
        flat = self.network(ops.reshape(points, (-1, 9)))
        found = ops.reshape(flat, (-1, 4, 5, 4))
        seen = ops.exp(-ops.cumsum(ops.relu(found[..., 3]), axis=-1))
        return ops.sum(seen[..., None] * ops.sigmoid(found[..., :3]), axis=-2)


def radiance_field(_):
    starts, directions = keras.Input((4, 3)), keras.Input((4, 3))
    return keras.Model([starts, directions], Rendered()(starts, directions))


def rays(rng, rows):
    starts, directions, colors = rng.normal(size=(3, rows, 4, 3))
    return [starts, directions], colors


IMAGES = images(8, 8, 1, classes=None)

ENTRIES = [
    Entry("vae", vae, IMAGES, None, "bookkeeping"),
    Entry("vae_of_layers", vae_of_layers, IMAGES, "mse", "bookkeeping"),
    Entry("sparse_autoencoder", sparse_autoencoder, IMAGES, "mse", "bookkeeping"),
    Entry("diffusion", diffusion, IMAGES, None, "bookkeeping"),
    Entry("vq_vae", vq_vae, IMAGES, None, "bookkeeping"),
    Entry("vq_vae_of_layers", vq_vae_of_layers, IMAGES, "mse", "bookkeeping"),
    Entry("flow", flow, images(2, classes=None), None, "bookkeeping"),
    Entry("pixel_cnn", pixel_cnn, IMAGES, "mse", "bookkeeping"),
    Entry("vocoder", vocoder, numbers(8, 3, targets=(16, 1)), "mse", "bookkeeping"),
    Entry("radiance_field", radiance_field, rays, "mse", "bookkeeping"),
    Entry("monte_carlo_dropout", monte_carlo_dropout, numbers(6), "mse", "bookkeeping"),
]
