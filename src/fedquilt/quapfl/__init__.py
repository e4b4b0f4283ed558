"""The classes and the self-test of the QuAP-FL documents."""
