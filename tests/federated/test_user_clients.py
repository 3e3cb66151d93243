"""Users of a data set as clients: each replies for all of its rows."""

import keras
import numpy as np
import pytest

from tests.reference import per_example_gradients
from tests.small import CLIP, data, logits_loss, network
from tfdp.federated import Simulation, UserClients

pytestmark = pytest.mark.filterwarnings(
    "ignore:Training without noise", "ignore:The privacy noise is reproducible"
)

# Users with 1 to 5 rows, not beside each other.
IDS = np.array([3, 1, 1, 2, 1, 3, 1, 4, 1, 2, 3, 5])


def simulated(rows, ids, most=5, users=None, **options):
    options = {"noise_multiplier": 0.0, "l2_norm_clip": CLIP} | options
    users = users or len(set(ids.tolist()))
    return Simulation(
        network(),
        logits_loss(),
        *rows,
        clients=UserClients(ids, users, most, seed=1),
        optimizer=keras.optimizers.SGD(1.0),
        **options,
    )


def test_everyone_takes_part_once_in_a_pass_with_its_own_rows():
    clients = UserClients(IDS, 2, examples_per_user=3, seed=1)
    assert (clients.number_of_clients, clients.rounds_per_pass) == (5, 2)
    seen = []
    for number in range(clients.rounds_per_pass):
        for rows in clients.rows_of_round(number, 12).reshape(2, 3):
            own = rows[rows >= 0]
            [user] = set(IDS[own].tolist())
            assert len(set(own.tolist())) == min(3, (user == IDS).sum())
            seen.append(user)
    assert len(set(seen)) == 4
    # The same again, and another part of a user's rows in another round.
    again = UserClients(IDS.astype(str), 2, examples_per_user=3, seed=1)
    np.testing.assert_array_equal(
        again.rows_of_round(1, 12), clients.rows_of_round(1, 12)
    )
    others = UserClients([7] * 9 + [8] * 50, 2, examples_per_user=4).rows_of_round(
        0, 59
    )
    alone = UserClients([7] * 3 + [8] * 50, 2, examples_per_user=4).rows_of_round(0, 53)
    assert set(others[others >= 9] - 9) == set(alone[alone >= 3] - 3)
    one = UserClients([7] * 50, 1, examples_per_user=4)
    assert one.rows_of_round(0, 50).tolist() != one.rows_of_round(1, 50).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "bookkeeping"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"engine": "vectorized", "physical_batch_size": 10},
                {"engine": "bookkeeping", "jit_compile": True, "noise": "per_client"},
            )
        ),
    ],
    ids=str,
)
def test_equals_users_one_by_one(options):
    keras.config.set_floatx("float64")
    x, y = data()
    simulation = simulated((x, y), IDS, **options)
    model = network()
    replies, norms = [], []
    for user in set(IDS.tolist()):
        own = user == IDS
        gradients = per_example_gradients(model, logits_loss(), x[own], y[own])
        mean = np.concatenate([np.ravel(each.mean(0)) for each in gradients])
        norms.append(np.linalg.norm(mean))
        replies.append(mean * min(1.0, CLIP / norms[-1]))
    assert min(norms) < CLIP < max(norms)
    before = np.concatenate([np.ravel(w) for w in simulation.model.get_weights()])
    simulation.run(1, verbose=0)
    after = np.concatenate([np.ravel(w) for w in simulation.model.get_weights()])
    np.testing.assert_allclose(before - after, np.mean(replies, 0), atol=1e-9)
    np.testing.assert_allclose(sorted(simulation.nonprivate_norms), sorted(norms))


@pytest.mark.slow
def test_a_user_with_a_thousand_rows_moves_a_round_by_at_most_2_c():
    rows = data(1010)
    rows[0][10:] *= 100
    ids = np.r_[np.arange(10), np.full(1000, 99)]
    weights = []
    for of_user in (0, 1):
        changed = np.where(ids == 99, of_user, rows[1]).astype(rows[1].dtype)
        simulation = simulated((rows[0], changed), ids, most=1000)
        simulation.run(1, verbose=0)
        flat = [np.ravel(each) for each in simulation.model.get_weights()]
        weights.append(np.concatenate(flat))
    moved = 11 * np.linalg.norm(weights[0] - weights[1])
    assert CLIP < moved <= 2 * CLIP * (1 + 1e-5)


@pytest.mark.slow
def test_the_statement_says_what_the_unit_is():
    simulation = simulated(data(), IDS, users=2, noise_multiplier=2.0)
    simulation.run(2, verbose=0)
    statement = " ".join(simulation.privacy_statement(1e-5).split())
    assert "A client is a user, that is all rows of x with the same id." in statement
    assert "Replies of a client: 1 at most." in statement
    with pytest.raises(ValueError, match="A client must not take part more often"):
        simulation.run(3, verbose=0)


@pytest.mark.slow
def test_goes_on_in_its_folder_with_the_same_users_only(tmp_path):
    whole = simulated(data(), IDS, most=2, users=2)
    whole.run(2, verbose=0)
    simulated(data(), IDS, most=2, users=2).run(1, directory=tmp_path, verbose=0)
    resumed = simulated(data(), IDS, most=2, users=2)
    resumed.run(2, directory=tmp_path, verbose=0)
    for one, other in zip(
        whole.model.get_weights(), resumed.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="other values of clients"):
        simulated(data(), IDS[::-1], most=2, users=2).run(
            2, directory=tmp_path, verbose=0
        )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((IDS, 6, 1), ValueError, "Use `clients_per_round=5`"),
        ((IDS, 0, 1), ValueError, "clients_per_round"),
        ((IDS, 1, float("nan")), ValueError, "examples_per_user"),
        ((IDS, 1, 1, -1), ValueError, "seed"),
        (([1, None], 1, 1), TypeError, "1 missing of 2"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        UserClients(*arguments)


def test_ids_of_other_rows_are_refused():
    with pytest.raises(ValueError, match=r"len\(user_ids\)=11, 12 rows"):
        simulated(data(), IDS[:-1])
