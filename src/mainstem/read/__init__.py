"""What can be read of a model and of one run without ranking anything: anatomy, shapes, lens, units."""
