"""fedquilt: federated learning for clients that are not equal."""
