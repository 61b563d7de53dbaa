"""The autoscaling policy: pure functions from an observation to a decision. No clock, no I/O, no logging.

observation     what is known of a pool: demand, replicas by state, prices, measured durations, forecast
decision        actions on replicas, each with its reason and numbers
"""
