"""A simulated fleet under an autoscaling policy, over hours or weeks.

demand, curves      arrivals per second: from a file, from a fleet's history, or made up
serving             the fluid model of a pool: queue, decodes, time to first token, in ticks of a second
replicas            replicas by state, and how long each change of state takes
signals             what a controller would see of the demand
policy, baselines   the policy of `penstock.fleet`, and others to compare it with
oracle              the fewest replica-hours that keep the SLO, the demand known ahead
fluid, requests     one run: in ticks of a second, or request by request
"""
