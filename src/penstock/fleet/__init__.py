"""The fleet controller: the right number of replicas of every pool, in the right state and place.

Once a second it observes, decides, acts and records. `policy` is pure and shared with the simulator and replay;
`controller` is the shell around it; `drivers` start and stop replicas on one machine or by an orchestrator.
"""
