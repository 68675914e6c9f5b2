"""Turns logits into token ids, on each kind of device."""
