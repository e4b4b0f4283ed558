"""What may be shown of runs and ledgers, as plain data: read from their files, on the public lists.

Whoever draws pages and tables (`fedquilt.report`) gets dictionaries from here and opens no file.
"""

from fedquilt.report.views.ledger import client_history, ledger_view, planned_cost
from fedquilt.report.views.page import page_view
from fedquilt.report.views.run import run_view

__all__ = ["client_history", "ledger_view", "page_view", "planned_cost", "run_view"]
