"""Models and accelerators by name: dimensions, data sheets, and shapes of bases without weights."""
