"""A federated app on fedquilt."""
