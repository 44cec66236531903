"""Run engines in processes or threads, behind one interface, and restart them."""
