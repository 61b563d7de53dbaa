"""Demand of each pool, for the controller of a fleet, and what that says of pools in return.

meter       what this gateway sees of each pool, read once a second in the event loop
tally       the same added up and as quantiles: rows of the store
statuses    what controllers say of pools, in force here: ETAs, and models that exist without a replica
reporter    the thread that writes rows and reads what controllers say
"""
