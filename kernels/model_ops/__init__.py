"""What a decoder computes besides attention: products, norms, gates and sampling, on each kind of device."""
