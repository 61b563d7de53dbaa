"""Measurements of rollouts by this gateway: how the new version of a model does beside the old one.

board               orders from the store, and where what is measured goes
following           the rollouts that are on, and the tenants that stay with the old version
observed_request    one client's request of a model under a rollout
pairs               copies of a request for both versions, one after the other
observation         what is known of one answer when it has ended, as numbers
folding             observations added up in blocks
memory              which version answered which request, for users' feedback
writer              the thread that folds, and writes blocks and feedback into the store
feedback            POST /v1/penstock/feedback
answers             text and tool calls of an answer, from its bytes
validity, json_schema   whether guided output and tool calls are what was asked for
comparisons         copies beside the client's answer: agreement, divergence, a judge's word
model_asker         requests to models of this gateway that nobody is charged for
"""
