"""What a node runs."""

from fedquilt.flower import client_app
from quiltapp.task import client_data, make_model

app = client_app(make_model, client_data)
