"""The steps of one engine: the running set, the budget of a step, and the steps in flight."""
