"""Checkpoints of TensorFlow have the ledger, and what they bring is known by it."""

import pytest
import tensorflow as tf

from tests import forks
from tests.runs.models import fit, ledger_of, loop, optimizer, part, private


@pytest.mark.slow
def test_a_checkpoint_of_tensorflow_has_the_ledger(tmp_path):
    model = private(part("model"))
    fit(model)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    fit(model)
    checkpoint.restore(path).assert_consumed()
    # Eight steps have run, whatever was put back.
    assert model.ledger.steps == 8
    script = f"""
import json, keras, tensorflow as tf, tfdp
from tests.runs.models import fit, loop, optimizer, part, private
from tfdp.runs.histories import was_trained

model = private(part("model"))
checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
checkpoint.restore({path!r}).assert_existing_objects_matched()
assert model.ledger.steps == 4, model.ledger
assert all(map(was_trained, model.weights))
assert model.ledger.to_json() == {ledger_of(4).to_json()!r}
fit(model)
assert model.ledger.steps == 8, model.ledger

# Of a loop of one's own, the optimizer has it.
model, opt = part("model"), optimizer()
loop(model, opt, traced=False)()
saved = tf.train.Checkpoint(model=model, optimizer=opt).save({str(tmp_path / "loop")!r})
model, opt = part("model"), optimizer()
opt.build(model.trainable_variables)
tf.train.Checkpoint(model=model, optimizer=opt).restore(saved).expect_partial()
assert opt.ledger.steps == 1, opt.ledger
loop(model, opt, traced=False)()
assert opt.ledger.steps == private(model).ledger.steps == 2
"""
    result = forks.run(script)
    assert result.returncode == 0, result.stderr


def test_a_checkpoint_of_a_loop_ties_its_runs_to_the_variables(tmp_path):
    """Before another step, and whichever of model and optimizer is built first."""
    model, opt = part("model"), optimizer()
    loop(model, opt, traced=False)()
    saved = tf.train.Checkpoint(model=model, optimizer=opt).save(str(tmp_path / "loop"))
    del model, opt
    for is_built in (False, True):
        model, opt = part("model"), optimizer()
        if is_built:
            opt.build(model.trainable_variables)
        tf.train.Checkpoint(model=model, optimizer=opt).restore(saved)
        if not is_built:
            opt.build(model.trainable_variables)
        assert private(model).ledger.steps == opt.ledger.steps == 1


@pytest.mark.slow
def test_a_private_model_can_be_saved_by_tensorflow(tmp_path):
    model = private(part("model"))
    fit(model)
    tf.saved_model.save(model, str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "saved_model.pb").exists()
