"""Output of commands: tables, reports and live screens, and the sources of their figures."""
