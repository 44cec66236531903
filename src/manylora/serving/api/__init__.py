"""The HTTP routes: one file per resource, and the bodies and answers that they share."""
