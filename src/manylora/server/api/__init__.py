"""The HTTP routes: one file per resource, and the bodies, parameters and errors that they share."""
