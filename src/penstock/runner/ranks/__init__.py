"""A model over several processes: the first rank leads, the others follow.

The scheduler, the sampler and the server exist once, at the leader. A step's packed inputs, and whatever else changes
what lies on the devices, are sent to all followers in one order (`messages`); each rank then makes the same calls on
its own part of the model, and they meet in collectives (`penstock.model.ranks`). Nothing is answered but at the start.
"""
