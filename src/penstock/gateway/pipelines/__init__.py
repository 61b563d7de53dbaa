"""Pipelines: a graph of steps behind one model's name.

`types` and `graph` are what a pipeline is, `reader` makes one of a YAML file and `checker` proves it before it is
served. `machine` decides what runs when, without I/O and without a clock; `run` does it: each model step is a request
inside the gateway that is routed by itself (`model_call`), each Python step a call of a process of its own
(`python_pool`). `service` holds the pipelines in force and what is counted of them.
"""
