"""All backends: how they join and leave, the polls, the union of their models, and adapters on all of them."""
