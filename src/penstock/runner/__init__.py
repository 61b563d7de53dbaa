"""The model runner: inputs, the model's step, the sampler, the cache's memory. Torch lives here.

It reads a `StepPlan` and answers a `StepResult`; it keeps no request and decides nothing about who runs.
"""
