"""The roofline against what was measured: cells of a benchmark's table, predicted, and the constants fitted to them."""
