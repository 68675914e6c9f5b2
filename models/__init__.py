"""Models and one step on the device: checkpoints, the decoder, the sampler and the model runner."""
