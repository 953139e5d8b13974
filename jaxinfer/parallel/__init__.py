"""Meshes and collectives: the only room that names mesh axes."""
