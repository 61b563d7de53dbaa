"""Rollouts: a new version of a model takes over step by step, and goes back by itself if it is worse.

Gateways measure both versions (`core.rollout`), the policy compares them and decides, the runner observes, records and
acts.

policy/     pure: plan, state, sequential tests, gates and `decide`; shared with the simulator
runner      one round of all rollouts, over the store: by the fleet's controller, or by a gateway
elected     the thread of a gateway that may run it, under a lease
desk        what operators do: start one, see how it stands and why
"""
