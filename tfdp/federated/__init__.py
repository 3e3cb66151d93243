"""Federated learning under local differential privacy."""

from tfdp.accounting.local import (
    calibrate_local_noise_multiplier as calibrate_local_noise_multiplier,
)
from tfdp.accounting.local import local_epsilon as local_epsilon
from tfdp.federated.client import client_update as client_update
from tfdp.federated.client import privatize as privatize
from tfdp.federated.simulation import Simulation as Simulation
from tfdp.federated.user_clients import UserClients as UserClients
from tfdp.federated.virtual_clients import VirtualClients as VirtualClients
