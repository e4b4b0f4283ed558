"""Server-side condensation from class statistics."""
