"""What runs beside the SuperLink; it holds no training data."""

from fedquilt.flower import server_app
from quiltapp.task import make_model, test_data

app = server_app(make_model, test_data)
