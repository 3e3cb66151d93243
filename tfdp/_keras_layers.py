"""Private parts of Keras that `tfdp.validation` needs."""

import contextlib
from collections.abc import Iterator

import keras
from keras.src.backend.common import global_state


def layers_by_path(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the model and all the layers in it, with the names that lead to them.

    Every layer comes after all that contain it; a shared one is listed once, with
    the path that was found first. Only the model itself goes by the model's name.
    """
    found: dict[int, tuple[str, keras.layers.Layer]] = {}

    def visit(layer: keras.layers.Layer, path: str) -> None:
        found[id(layer)] = found.pop(id(layer), (path, layer))
        prefix = "" if layer is model else f"{path}/"
        for child in layer._layers:
            visit(child, prefix + child.name)

    visit(model, model.name)
    return list(found.values())


@contextlib.contextmanager
def own_global_seed() -> Iterator[keras.random.SeedGenerator]:
    """Yield a generator that stands in for the one of unseeded random functions."""
    name = "global_seed_generator"
    original = global_state.get_global_attribute(name)
    generator = keras.random.SeedGenerator(seed=0, name="tfdp_probe")
    global_state.set_global_attribute(name, generator)
    try:
        yield generator
    finally:
        global_state.set_global_attribute(name, original)
