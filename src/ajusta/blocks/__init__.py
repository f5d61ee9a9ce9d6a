"""Floor 3, tensors: quantized weights, adapters, attention, loss, optimizer. Each knows tensors only, no model."""
