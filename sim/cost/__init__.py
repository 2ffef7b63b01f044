"""What a step costs: operation formulas, device files and the modelled backend."""
