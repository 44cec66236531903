"""Models and accelerators by name: dimensions, data sheets, and shapes of bases that have no weights here."""
