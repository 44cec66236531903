"""How engines are run: in a process or a thread, behind one interface, and kept alive."""
