"""From a prompt to a scored group: sample, check parity, score, choose, replay; and the same to evaluate."""
