"""Models of `keras.applications`, whole and as frozen trunks of new heads, as a table.

``python -m tests.applications`` prints it, of the models as they are; the tests take the
first blocks of each.
"""

import dataclasses

import keras
import numpy as np

import tfdp

TARGETS = 3


@dataclasses.dataclass(frozen=True)
class Application:
    """A model of `keras.applications`.

    Args:
        name: Of its class, or function, there.
        first_blocks: Layer that ends the blocks which the tests take.
        size: Height and width of the images, about the smallest that it takes.
    """

    name: str
    first_blocks: str
    size: int = 32

    def trunk(self, *, is_whole: bool = True) -> keras.Model:
        """Make the model without its own head, with any weights."""
        make = getattr(keras.applications, self.name)
        shape = (self.size, self.size, 3)
        whole = make(weights=None, include_top=False, input_shape=shape)
        if is_whole:
            return whole
        return keras.Model(whole.input, whole.get_layer(self.first_blocks).output)

    def batch(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw images, and what to predict of them."""
        rng = np.random.default_rng(0)
        x = rng.uniform(0, 255, (rows, self.size, self.size, 3))
        return x.astype(keras.config.floatx()), rng.normal(size=(rows, TARGETS))


def trained_whole(trunk: keras.Model) -> keras.Model:
    """Put a head on a trunk, and make it one that can be trained privately."""
    x = keras.layers.GlobalAveragePooling2D()(trunk.output)
    whole = keras.Model(trunk.input, keras.layers.Dense(TARGETS)(x))
    return tfdp.fix_model(whole)


def trained_head(trunk: keras.Model) -> keras.Model:
    """Freeze a trunk, with the normalization that it has, and train a head on it."""
    trunk.trainable = False
    head = keras.Sequential([
        keras.Input(trunk.input.shape[1:]),
        trunk,
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(TARGETS),
    ])
    return tfdp.fix_model(head)


APPLICATIONS = {
    application.name: application
    for application in (
        Application("MobileNetV2", "block_5_add"),
        Application("MobileNetV3Small", "expanded_conv_4_add"),
        Application("MobileNetV3Large", "expanded_conv_4_add"),
        Application("EfficientNetV2B0", "block4b_add"),
        Application("ResNet50V2", "conv3_block1_out"),
        Application("DenseNet121", "pool2_pool"),
        Application("ConvNeXtTiny", "convnext_tiny_stage_1_block_0_identity"),
        Application("Xception", "block3_pool", 71),
        Application("VGG16", "block3_pool"),
    )
}
