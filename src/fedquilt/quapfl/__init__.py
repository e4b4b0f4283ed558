"""The server class of the QuAP-FL API document, and a self-test of its formulas."""
