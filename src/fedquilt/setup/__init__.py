"""From a configuration to a federation that can run: clients, task, method, mechanism, account."""
