"""Privacy: budgets, clipping, noise, accounting, the ledger and the statement.

Import what you need from the modules; this package loads nothing by itself, so
that training needs torch and numpy only.
"""
