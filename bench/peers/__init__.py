"""Other engines, from their own packages, behind one protocol."""
