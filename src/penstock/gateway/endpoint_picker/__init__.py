"""penstock as an Endpoint Picker (EPP) of the Gateway API Inference Extension: Envoy asks, and sends requests itself.

    Envoy --ext_proc over gRPC--> `server` > `ext_proc` (messages) > `picker` (decides) > `picked_request` (the rest)

It needs the extra penstock[epp]; only `server`, `ext_proc` and `ext_proc_messages` import gRPC and protobuf."""
