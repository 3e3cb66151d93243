"""Federated learning under local privacy with Flower: `pip install 'tfdp[flower]'`.

What runs where each client's data are, in the client's own `ClientApp`::

    budget = flower.LocalBudget("/var/lib/app/budget.json", epsilon=8.0, delta=1e-7)
    app = ClientApp(mods=[flower.local_dp_mod(budget, max_l2_norm_clip=1.0)])


    @app.train()
    def train(message, context):
        x, y = examples_of_this_client()
        return flower.gradient_reply(message, build_model(), "mse", x, y)

And on the server, which is not trusted with anything::

    app = ServerApp()


    @app.main()
    def main(grid, context):
        strategy = flower.LDPFedSGD(
            build_model(),
            optimizer=keras.optimizers.SGD(1.0),
            l2_norm_clip=0.05,
            clients_per_round=1000,
        )
        strategy.start(grid, strategy.initial_arrays(), num_rounds=100)
        strategy.model.save("model.keras")

Flower's `flwr run` sends the code of the `ClientApp` to the clients. Whoever may start
a run could send another one, without this privacy: let clients run only code that they
have checked, and keep numbers of the budget out of `context.run_config`, which comes
from there too.
"""

try:
    import flwr.app  # noqa: F401
    import flwr.serverapp.strategy  # noqa: F401
except ImportError as missing:
    raise ImportError(
        "`tfdp.federated.flower` needs Flower. Use `pip install 'tfdp[flower]'`."
    ) from missing

from tfdp.federated.flower.arrays import CLIP_KEY as CLIP_KEY
from tfdp.federated.flower.arrays import set_weights as set_weights
from tfdp.federated.flower.client import gradient_reply as gradient_reply
from tfdp.federated.flower.client import local_dp_mod as local_dp_mod
from tfdp.federated.flower.server import LDPFedSGD as LDPFedSGD
from tfdp.federated.local_budget import LocalBudget as LocalBudget
