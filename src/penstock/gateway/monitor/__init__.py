"""Monitoring: the state of the gateway and its replicas, alerts, answer probes.

monitor             SLO burn rates, anomalies and alerts, evaluated once a second
fleet_reader        the replicas as the monitor's rules see them
metrics             the monitor's own metrics
answer_prober       questions with known answers, sent to replicas
alert_sender        alerts to webhooks, Slack and PagerDuty
state               the state of the gateway at this moment, for the admin API and /metrics
"""
