"""TensorFlow Privacy's names take its arguments in its order."""

import inspect

import keras
import pytest

from tfdp import optimizers
from tfdp.errors import NotPrivateError

# Name, Keras's optimizer, what TensorFlow Privacy takes as the fourth argument.
NAMES = [
    (prefix + name + "Optimizer", getattr(keras.optimizers, name), fourth)
    for name in ("SGD", "Adam", "Adagrad")
    for prefix, fourth in (("DPKeras", 1), ("VectorizedDPKeras", True))
]
IDS = [name for name, _, _ in NAMES]
PLAIN_IDS = [name for name in IDS if name.startswith("DP")]


@pytest.mark.parametrize(("name", "inner", "fourth"), NAMES, ids=IDS)
def test_positional_arguments_mean_what_they_meant(name, inner, fourth):
    optimizer = getattr(optimizers, name)(0.5, 1.25, 4, fourth, 0.375)
    assert isinstance(optimizer, optimizers.DPOptimizer)
    assert type(optimizer.inner_optimizer) is inner
    assert float(optimizer.l2_norm_clip) == 0.5
    assert float(optimizer.noise_multiplier) == 1.25
    assert optimizer.num_microbatches == 4
    assert float(optimizer.learning_rate) == 0.375


@pytest.mark.parametrize(("name", "inner", "fourth"), NAMES, ids=IDS)
def test_keyword_arguments_mean_what_they_meant(name, inner, fourth):
    optimizer = getattr(optimizers, name)(
        l2_norm_clip=0.5, noise_multiplier=1.25, learning_rate=0.375
    )
    assert optimizer.num_microbatches is None
    assert optimizer.examples_per_unit(64) == 1
    assert float(optimizer.learning_rate) == 0.375


@pytest.mark.parametrize(("name", "inner", "fourth"), NAMES, ids=IDS)
def test_arguments_of_both_optimizers_are_taken(name, inner, fourth):
    optimizer = getattr(optimizers, name)(
        0.5, 1.25, use_ema=True, expected_batch_size=8, name="mine"
    )
    assert optimizer.inner_optimizer.use_ema
    assert optimizer.expected_batch_size == 8
    assert optimizer.name == "mine"


@pytest.mark.parametrize(("name", "inner", "fourth"), NAMES, ids=IDS)
def test_configuration_round_trip(name, inner, fourth):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    optimizer = getattr(optimizers, name)(0.5, 1.25, 4, fourth, schedule)
    serialized = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(serialized)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize("name", IDS)
def test_files_are_read_whichever_module_wrote_them(name):
    optimizer = getattr(optimizers, name)(0.5, 1.25, 4)
    serialized = keras.saving.serialize_keras_object(optimizer)
    assert serialized["registered_name"] == f"tfdp>{name}"
    older = serialized | {"module": "tfdp.optimizers.tf_privacy"}
    again = keras.saving.deserialize_keras_object(older)
    assert type(again) is type(optimizer)


@pytest.mark.parametrize("name", IDS)
def test_the_signature_tells_the_order(name):
    optimizer = getattr(optimizers, name)
    fourth = "gradient_accumulation_steps"
    if name not in PLAIN_IDS:
        fourth = "unconnected_gradients_to_zero"
    assert list(inspect.signature(optimizer).parameters) == [
        "l2_norm_clip", "noise_multiplier", "num_microbatches", fourth, "args", "kwargs"
    ]  # fmt: skip
    assert fourth in inspect.getdoc(optimizer.__init__)


@pytest.mark.parametrize("name", PLAIN_IDS)
@pytest.mark.parametrize("steps", [2, 0])
def test_gradient_accumulation_is_refused(name, steps):
    with pytest.raises(ValueError, match=rf"steps={steps}\. Use .*physical_batch_size"):
        getattr(optimizers, name)(0.5, 1.25, gradient_accumulation_steps=steps)
    with pytest.raises(ValueError, match=rf"steps={steps}\. Use .*physical_batch_size"):
        getattr(optimizers, name)(0.5, 1.25, None, steps)


@pytest.mark.parametrize("name", [name for name in IDS if name not in PLAIN_IDS])
def test_gradient_accumulation_of_the_inner_optimizer_is_refused(name):
    with pytest.raises(ValueError, match=r"=2\. Use .*physical_batch_size"):
        getattr(optimizers, name)(0.5, 1.25, gradient_accumulation_steps=2)


@pytest.mark.parametrize("name", IDS)
def test_numbers_are_checked(name):
    with pytest.raises(ValueError, match="`l2_norm_clip` must be positive"):
        getattr(optimizers, name)(0.0, 1.25)
    with pytest.raises(TypeError, match="noise_multiplier"):
        getattr(optimizers, name)(0.5)


@pytest.mark.parametrize("name", IDS)
def test_gradients_of_a_batch_are_refused(name):
    optimizer = getattr(optimizers, name)(0.5, 1.25)
    with pytest.raises(NotPrivateError, match=f"`{name}` never trains"):
        optimizer.apply_gradients([])
