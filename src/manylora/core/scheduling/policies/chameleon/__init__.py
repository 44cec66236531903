"""The policy of Chameleon: a queue per request size, token quotas, opportunistic bypass."""
