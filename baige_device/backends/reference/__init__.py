"""The embedded default and the ground truth: every op in plain torch, on any device torch can address."""
