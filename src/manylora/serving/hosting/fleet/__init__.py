"""The engines of a service behind one interface: adapters, requests, restarts, scaling."""
